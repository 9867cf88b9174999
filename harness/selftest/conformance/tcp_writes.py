"""How events become TCP writes: HTTP chunks, cut and joined where TCP and proxies cut and join them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from .shape import Cut, Framing, Shape

LEAD_MS = 0.6  # how long before its due time the first half of a cut event is sent


@dataclass(frozen=True)
class Write:
    """Bytes for one send, due_ms after the request was read; tokens: how many tokens they complete."""

    due_ms: float
    data: bytes
    tokens: int = 0


def cut_into_writes(shape: Shape, events: list[Write]) -> Iterator[Write]:
    """Frames the events' bytes and cuts them; each event's tokens go with the write that completes it."""
    chunks = _chunk_head(shape)
    if shape.flush_in_one_write:
        for due_ms, group in groupby(events, key=lambda event: event.due_ms):
            held = list(group)
            data = b"".join(_frame(event.data, chunks) for event in held)
            yield Write(due_ms, data, sum(event.tokens for event in held))
    elif shape.cut is Cut.SHIFTED:
        yield from _shifted(events, chunks)
    else:
        for event in events:
            yield from _one_event(shape, event, chunks)


def _one_event(shape: Shape, event: Write, chunks: bytes | None) -> Iterator[Write]:
    whole = _frame(event.data, chunks)
    lead_ms = max(0.0, event.due_ms - LEAD_MS)
    at = _middle(event.data)
    if shape.cut is Cut.WHOLE:
        yield Write(event.due_ms, whole, event.tokens)
    elif shape.cut is Cut.BYTES:
        last = whole.index(event.data) + len(event.data) - 1  # the event is complete with it; its chunk's end follows
        for byte in range(len(whole)):
            due_ms = event.due_ms if byte >= last else max(0.0, event.due_ms - shape.ms_per_token)
            yield Write(due_ms, whole[byte : byte + 1], event.tokens if byte == last else 0)
    elif shape.cut is Cut.INTO_CHUNKS:
        yield Write(lead_ms, _frame(event.data[:at], chunks))
        yield Write(event.due_ms, _frame(event.data[at:], chunks), event.tokens)
    else:
        at += whole.index(event.data)
        yield Write(lead_ms, whole[:at])
        yield Write(event.due_ms, whole[at:], event.tokens)


def _shifted(events: list[Write], chunks: bytes | None) -> Iterator[Write]:
    """Half of each event goes ahead with the write of the one before."""
    carried = 0
    for index, event in enumerate(events):
        following = events[index + 1].data if index + 1 < len(events) else b""
        ahead = _middle(following)
        yield Write(event.due_ms, _frame(event.data[carried:] + following[:ahead], chunks), event.tokens)
        carried = ahead


def _chunk_head(shape: Shape) -> bytes | None:
    """What follows a chunk's size; None where the body is not chunked."""
    if shape.framing is not Framing.CHUNKED:
        return None
    return b';part="a"' if shape.has_chunk_extras else b""


def _frame(data: bytes, chunks: bytes | None) -> bytes:
    return data if chunks is None else b"%x%s\r\n%s\r\n" % (len(data), chunks, data)


def _middle(data: bytes) -> int:
    """Where to cut: inside the first character of several bytes, else in the middle."""
    first = next((i for i, byte in enumerate(data) if byte >= 0x80), None)
    return len(data) // 2 if first is None else first + 1
