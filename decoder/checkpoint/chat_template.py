"""A checkpoint's chat template, rendered in a jinja2 sandbox the way transformers renders it."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import CheckpointError, RequestError

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's turns for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": _now}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template does not compile: {error}") from error
        self._special_tokens = special_tokens

    @classmethod
    def from_directory(cls, directory: Path) -> ChatTemplate | None:
        """From chat_template.jinja or tokenizer_config.json; None where neither has one. Raises CheckpointError."""
        path = directory / "tokenizer_config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            own_file = directory / "chat_template.jinja"
            source = own_file.read_text(encoding="utf-8") if own_file.exists() else config.get("chat_template")
        except (OSError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if isinstance(source, list):  # several named templates
            source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
        if not isinstance(source, str):
            return None
        return cls(source, _special_tokens(config))

    def render(self, messages: list[Any], *, add_generation_prompt: bool, **extra: Any) -> str:
        """The prompt's text. Raises RequestError for malformed messages or what the template itself refuses."""
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise RequestError(f"messages[{index}] is not an object with a role")
            if not isinstance(message.get("content"), str | list):
                raise RequestError(f"messages[{index}].content is neither a string nor a list of text parts")
        context = self._special_tokens | extra | {"messages": [_with_text(message) for message in messages]}
        try:
            return self._template.render(add_generation_prompt=add_generation_prompt, **context)
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:
            raise RequestError(f"the chat template refuses these messages: {error}") from error


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message with a list of text parts joined to one string."""
    content = message["content"]
    if isinstance(content, str):
        return message
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError("a message has a part that is not text", "this decoder reads text only")
    return message | {"content": "".join(part["text"] for part in content)}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
