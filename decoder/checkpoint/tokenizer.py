"""A checkpoint's byte-level BPE tokenizer: text to ids, ids to bytes. Absent from structured checkpoints."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from ..errors import CheckpointError, RequestError
from .chat_template import ChatTemplate


class TextTokenizer:
    """tokenizer.json of a checkpoint, and its chat template where it has one."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None = None) -> None:
        self._tokenizer = tokenizer
        self.chat_template = chat_template
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes_by_id: dict[int, bytes] = {}

    @classmethod
    def from_directory(cls, directory: Path) -> TextTokenizer | None:
        """The tokenizer of a checkpoint directory, None where it has none. Raises CheckpointError for a bad one."""
        path = directory / "tokenizer.json"
        if not path.exists():
            return None
        try:
            text = path.read_text(encoding="utf-8")
            decoder = json.loads(text).get("decoder") or {}
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:
            raise CheckpointError(f"{path} is not a tokenizer: {error}") from error
        if decoder.get("type") != "ByteLevel":
            raise CheckpointError(
                f"{path}: its decoder is {decoder.get('type')!r}, expected 'ByteLevel'",
                "this decoder streams byte-level BPE; move tokenizer.json away to serve token ids only",
            )
        return cls(tokenizer, ChatTemplate.from_directory(directory))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Raises RequestError for text that is not valid Unicode."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not valid Unicode at character {error.start}: a lone surrogate") from None
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """The whole text of some tokens, special ones included."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; several tokens may share one character. Empty for ids without a token."""
        known = self._bytes_by_id.get(token_id)
        if known is None:
            known = self._bytes_by_id[token_id] = _bytes_of(self._tokenizer.id_to_token(token_id))
        return known

    def is_special(self, token_id: int) -> bool:
        """Whether the tokenizer marks this token as special, so that it is left out of text."""
        return token_id in self._special_ids


def _bytes_of(token: str | None) -> bytes:
    """Undo the byte-level alphabet; a token with a character outside it (an added one) stands for itself."""
    if token is None:
        return b""
    alphabet = _byte_alphabet()
    try:
        return bytes(alphabet[character] for character in token)
    except KeyError:
        return token.encode("utf-8")


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte-level alphabet: printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
