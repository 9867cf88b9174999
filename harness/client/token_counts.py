"""How many tokens each event carried, exactly, or why nobody can know."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from ..run.records import TokenEvent
from .transcript import Chunk, Transcript

_NO_CHARACTER = "\ufffd"


class TextTokenizer(Protocol):
    """What the client needs of a tokenizer: ids to text and back, special tokens left out of the text."""

    def encode(self, text: str) -> list[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...


class CountedBy(StrEnum):
    """Where the token counts come from, best first."""

    IDS = "ids"
    RUNNING_USAGE = "running usage"
    ONE_PER_EVENT = "one token an event, confirmed by usage"
    TOKENIZER = "tokenizer, confirmed by usage"


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Events with exact counts, or the reason there are none."""

    events: tuple[TokenEvent, ...]
    counted_by: CountedBy | None = None
    problem: str | None = None


def count_tokens(transcript: Transcript, tokenizer: TextTokenizer | None = None) -> TokenCounts:
    """Ids where the server sends them; else running usage, one token an event or the tokenizer, if usage confirms."""
    chunks = transcript.chunks
    total = transcript.usage.completion_tokens
    spoken = [chunk for chunk in chunks if chunk.text]
    if any(chunk.token_ids for chunk in chunks):
        return _by_ids(chunks)
    if spoken and all(chunk.running_tokens is not None for chunk in spoken):
        counts = _by_running_usage(chunks)
        if counts.events and sum(event.num_tokens for event in counts.events) == total:
            return counts
    if not spoken:
        return TokenCounts((), problem="no tokens came")
    if total == len(spoken):
        events = tuple(TokenEvent(t_ns=c.t_ns, token_ids=(), text=c.text, counted_tokens=1) for c in spoken)
        return TokenCounts(events, CountedBy.ONE_PER_EVENT)
    if tokenizer is not None and total is not None:
        return _by_tokenizer(spoken, total, tokenizer)
    said = "no usage" if total is None else f"a usage of {total} tokens"
    return TokenCounts((), problem=f"tokens cannot be counted: no token ids, {len(spoken)} events with text and {said}")


def text_problem(events: Sequence[TokenEvent], tokenizer: TextTokenizer) -> str | None:
    """Why the streamed text is not the text of the streamed ids; None where they agree.

    Bytes that are no character are not compared: a server may hold them back. Where the ids begin with such, they may
    end the prompt's last character, which the server then shows and the ids alone do not.
    """
    streamed = "".join(event.text for event in events).replace(_NO_CHARACTER, "")
    decoded = tokenizer.decode([token for event in events for token in event.token_ids])
    begins_inside_a_character = decoded.startswith(_NO_CHARACTER)
    decoded = decoded.replace(_NO_CHARACTER, "")
    if streamed == decoded or (begins_inside_a_character and streamed[1:] == decoded):
        return None
    at = next((i for i, (a, b) in enumerate(zip(streamed, decoded, strict=False)) if a != b), None)
    at = min(len(streamed), len(decoded)) if at is None else at
    return (
        f"text and ids disagree from character {at}: streamed {streamed[at : at + 20]!r}, "
        f"the ids say {decoded[at : at + 20]!r}"
    )


def _by_ids(chunks: Sequence[Chunk]) -> TokenCounts:
    events: list[TokenEvent] = []
    held_back = ""  # text without ids belongs to tokens that came before it (a character that had to be completed)
    for chunk in chunks:
        if chunk.token_ids:
            events.append(TokenEvent(t_ns=chunk.t_ns, token_ids=chunk.token_ids, text=held_back + chunk.text))
            held_back = ""
        elif chunk.text and chunk.token_ids is None:
            return TokenCounts((), problem=f"an event with text {chunk.text[:20]!r} but no ids, where others have them")
        elif chunk.text and events:
            events[-1] = events[-1].model_copy(update={"text": events[-1].text + chunk.text})
        else:
            held_back += chunk.text
    return TokenCounts(tuple(events), CountedBy.IDS)


def _by_running_usage(chunks: Sequence[Chunk]) -> TokenCounts:
    events: list[TokenEvent] = []
    before = 0
    for chunk in chunks:
        now = before if chunk.running_tokens is None else chunk.running_tokens
        if now < before:
            return TokenCounts((), problem=f"the running usage went back from {before} to {now} tokens")
        if now > before:
            events.append(TokenEvent(t_ns=chunk.t_ns, token_ids=(), text=chunk.text, counted_tokens=now - before))
        elif chunk.text and events:
            events[-1] = events[-1].model_copy(update={"text": events[-1].text + chunk.text})
        before = now
    return TokenCounts(tuple(events), CountedBy.RUNNING_USAGE)


def _by_tokenizer(spoken: Sequence[Chunk], total: int, tokenizer: TextTokenizer) -> TokenCounts:
    """The whole text must encode to the server's count; each event gets the ids that its end of the text reaches."""
    ids = tokenizer.encode("".join(chunk.text for chunk in spoken))
    if len(ids) != total:
        return TokenCounts((), problem=f"the text encodes to {len(ids)} tokens, the server counted {total}")
    events: list[TokenEvent] = []
    at = 0
    text = ""
    held_back = ""
    for chunk in spoken:
        text += chunk.text
        end = max(at, min(len(tokenizer.encode(text)), total))
        if end > at:
            events.append(TokenEvent(t_ns=chunk.t_ns, token_ids=tuple(ids[at:end]), text=held_back + chunk.text))
            held_back = ""
        else:
            held_back += chunk.text
        at = end
    return TokenCounts(tuple(events), CountedBy.TOKENIZER)
