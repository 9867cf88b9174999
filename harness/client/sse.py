"""Server-sent events from bytes in any split: the same bytes give the same events, however TCP cut them.

Follows the WHATWG event-stream grammar: LF, CR or CRLF, comment lines, a leading byte-order mark, several data lines.
"""

import re
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\r|\n")
_LF = 0x0A
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One dispatched event: its data lines joined by LF, and its type ("message" where the server names none)."""

    data: str
    event: str = "message"


class SseDecoder:
    """Feed bytes, take events. An event is out as soon as the byte that ends its blank line is in."""

    def __init__(self) -> None:
        self._line_parts: list[bytes] = []  # the unfinished line, in the pieces it came in
        self._data: list[bytes] = []
        self._event = b""
        self._skip_lf = False  # the last piece ended in CR: an LF at the start of the next belongs to it
        self._at_start = True

    def feed(self, piece: bytes) -> list[SseEvent]:
        """Returns the events that this piece completed, in order."""
        if self._skip_lf and piece:
            self._skip_lf = False
            if piece[0] == _LF:
                piece = piece[1:]
        if not piece:
            return []
        if b"\r" in piece:
            self._skip_lf = piece.endswith(b"\r")
            lines = _LINE_END.split(piece)
        else:
            lines = piece.split(b"\n")
        events: list[SseEvent] = []
        for end_of_line in lines[:-1]:
            self._line_parts.append(end_of_line)
            line = self._line_parts[0] if len(self._line_parts) == 1 else b"".join(self._line_parts)
            self._line_parts.clear()
            event = self._end_line(line)
            if event is not None:
                events.append(event)
        if lines[-1]:
            self._line_parts.append(lines[-1])
        return events

    def feed_whole(self, piece: bytes) -> bytes | None:
        """The data of a piece that is one whole event of one data line and no more; None of any other, not yet fed."""
        is_plain = piece.startswith(b"data: ") and piece.endswith(b"\n\n") and piece.count(b"\n") == 2
        if not is_plain or b"\r" in piece or self._line_parts or self._data or self._event or self._skip_lf:
            return None
        self._at_start = False
        return piece[6:-2]

    def finish(self) -> SseEvent | None:
        """The event left without its blank line when the body ended, or None. The decoder is empty afterwards."""
        line = b"".join(self._line_parts)
        self._line_parts.clear()
        if line:
            self._end_line(line)
        return self._dispatch()

    def _end_line(self, line: bytes) -> SseEvent | None:
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        if value.startswith(b" "):
            value = value[1:]
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._event = value
        return None

    def _dispatch(self) -> SseEvent | None:
        data, event = self._data, self._event
        self._event = b""
        if not data:
            return None
        self._data = []
        text = b"\n".join(data).decode("utf-8", errors="replace")
        return SseEvent(text, event.decode("utf-8", errors="replace")) if event else SseEvent(text)
