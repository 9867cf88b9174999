"""A tokenizer.json as the client needs it: to compare streamed text with streamed ids."""

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from ..errors import ConfigError
from .token_counts import TextTokenizer


class _JsonTokenizer:
    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


@lru_cache(maxsize=4)
def load_text_tokenizer(path: Path) -> TextTokenizer:
    """The tokenizer of a tokenizer.json; ConfigError where the file is not one."""
    require_tokenizer_json(path)
    return _JsonTokenizer(path)


def require_tokenizer_json(path: Path) -> None:
    """Refuses what is not a tokenizer.json with a message of ours."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a tokenizer: {error}", "name a tokenizer.json") from error
    if not isinstance(content, dict) or "model" not in content:
        raise ConfigError(f"{path} is not a tokenizer: it has no 'model'", "name a tokenizer.json")
