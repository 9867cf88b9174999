"""Text as it decodes: bytes to whole characters, and stop strings cut before they are shown."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class TokenBytes(Protocol):
    """What the stream needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of text."""
        ...


class CharacterStream:
    """Tokens in, whole characters out; the sum of all pieces is the full decode, byte for byte.

    A byte-level token may end inside a character: its bytes wait for the rest. Bytes that can never become one turn
    into U+FFFD exactly where a decode of the whole output would put it.
    """

    def __init__(self, tokenizer: TokenBytes, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip_special_tokens = tokenizer, skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters this token completes."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)


class StopScanner:
    """Text in, text safe to show out: the stop string completed first ends it, possible beginnings are held back.

    How the text is cut into pieces makes no difference to the whole.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that can no longer be part of a stop string; after a match, what stood before it, then nothing."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back and turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True, slots=True)
class TextPiece:
    """token_ids: those of the step that count; text: what may be shown; stopped_by: the stop string that ended it."""

    token_ids: tuple[int, ...]
    text: str
    stopped_by: str | None = None


class TextStream:
    """Steps of tokens in, pieces of text out, ids and text both trimmed at a stop string.

    The token that completes a stop string is the last one kept; tokens committed behind it in the same step are not.
    Without a tokenizer the text is always empty.
    """

    def __init__(
        self,
        tokenizer: TokenBytes | None,
        *,
        stops: Sequence[str] = (),
        skip_special_tokens: bool = True,
        silent_ids: frozenset[int] = frozenset(),
    ) -> None:
        """silent_ids: tokens that end the output and never show as text (EOS)."""
        self._characters = CharacterStream(tokenizer, skip_special_tokens=skip_special_tokens) if tokenizer else None
        self._scanner = StopScanner(stops)
        self._silent_ids = silent_ids

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """The piece of one step."""
        if self._characters is None:
            return TextPiece(tuple(token_ids), "")
        shown = ""
        for count, token_id in enumerate(token_ids, 1):
            if token_id not in self._silent_ids:
                shown += self._scanner.push(self._characters.push(token_id))
            if self._scanner.matched is not None:
                return TextPiece(tuple(token_ids[:count]), shown, self._scanner.matched)
        return TextPiece(tuple(token_ids), shown)

    def finish(self) -> tuple[str, str | None]:
        """(text still held, the stop string it completed): an unfinished character may complete one."""
        if self._characters is None or self._scanner.matched is not None:
            return "", None
        shown = self._scanner.push(self._characters.finish())
        return shown + self._scanner.finish(), self._scanner.matched


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that ends `text`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
