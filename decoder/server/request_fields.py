"""Which request fields the server takes: a schema table, checked by hand so that the decoder needs no pydantic."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError

Check = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Field:
    """check: whether a value is allowed; expected: said when it is not; why: the reason a neutral field is limited."""

    check: Check
    expected: str
    why: str = ""


def is_int(value: Any) -> bool:
    """An integer, and not true or false."""
    return type(value) is int


def is_number(value: Any) -> bool:
    """An integer or a float, and not true or false."""
    return type(value) in (int, float)


def _is_text_list(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list) and len(texts) <= 16 and all(isinstance(text, str) and text for text in texts)


def _is_id_list(value: Any) -> bool:
    return isinstance(value, list) and all(is_int(item) and item >= 0 for item in value)


def _is_stream_options(value: Any) -> bool:
    known = {"include_usage", "continuous_usage_stats"}
    return isinstance(value, dict) and set(value) <= known and all(isinstance(flag, bool) for flag in value.values())


def _one_of(*values: Any) -> Check:
    return lambda value: any(value == allowed and type(value) is type(allowed) for allowed in values)


def _number(*values: float) -> Check:
    return lambda value: is_number(value) and float(value) in values


_BOOL = Field(lambda value: isinstance(value, bool), "true or false")
_COUNT = Field(lambda value: is_int(value) and value >= 1, "an integer of at least 1")
_TEXT = Field(lambda value: isinstance(value, str), "a string")
_GREEDY = "this decoder is greedy"
_IGNORED = Field(lambda value: True, "anything")

COMMON_FIELDS: dict[str, Field] = {
    "model": _TEXT,
    "max_tokens": _COUNT,
    "stream": _BOOL,
    "stream_options": Field(_is_stream_options, "an object of include_usage and continuous_usage_stats, true or false"),
    "stop": Field(_is_text_list, "a non-empty string or a list of up to 16 of them"),
    "stop_token_ids": Field(_is_id_list, "a list of token ids"),
    "ignore_eos": _BOOL,
    "skip_special_tokens": _BOOL,
    "return_token_ids": _BOOL,
    "seed": Field(is_int, "an integer"),
    # Sampling: only what greedy decoding of one sequence means.
    "temperature": Field(_number(0.0), "0", _GREEDY),
    "top_p": Field(_number(1.0), "1", _GREEDY),
    "top_k": Field(_one_of(-1, 0, 1), "-1, 0 or 1", _GREEDY),
    "min_p": Field(_number(0.0), "0", _GREEDY),
    "typical_p": Field(_number(1.0), "1", _GREEDY),
    "presence_penalty": Field(_number(0.0), "0", _GREEDY),
    "frequency_penalty": Field(_number(0.0), "0", _GREEDY),
    "repetition_penalty": Field(_number(1.0), "1", _GREEDY),
    "logit_bias": Field(_one_of({}), "an empty object", _GREEDY),
    "use_beam_search": Field(_one_of(False), "false", _GREEDY),
    "n": Field(_one_of(1), "1", "one sequence is decoded at a time"),
    "best_of": Field(_one_of(1), "1", "one sequence is decoded at a time"),
    "min_tokens": Field(_one_of(0), "0", "use ignore_eos with max_tokens for a fixed length"),
    "logprobs": Field(_one_of(False), "absent", "log probabilities are not computed"),
    "top_logprobs": Field(_one_of(0), "0", "log probabilities are not computed"),
    "prompt_logprobs": Field(_one_of(0), "0", "log probabilities are not computed"),
    "response_format": Field(_one_of({"type": "text"}), '{"type": "text"}', "output is not constrained"),
    # Bookkeeping of clients, without effect here.
    "user": _IGNORED,
    "metadata": _IGNORED,
    "store": _IGNORED,
    "request_id": _IGNORED,
    "priority": _IGNORED,
}

COMPLETION_FIELDS: dict[str, Field] = COMMON_FIELDS | {
    "prompt": Field(lambda value: isinstance(value, str | list), "a string or a list of token ids"),
    "add_special_tokens": _BOOL,
    "echo": Field(_one_of(False), "false", "the prompt is never sent back"),
    "suffix": Field(_one_of(""), "absent", "text is only continued"),
}

CHAT_FIELDS: dict[str, Field] = COMMON_FIELDS | {
    "messages": Field(lambda value: isinstance(value, list) and len(value) > 0, "a non-empty list of messages"),
    "max_completion_tokens": _COUNT,
    "add_generation_prompt": _BOOL,
    "chat_template_kwargs": Field(lambda value: isinstance(value, dict), "an object"),
    "tools": Field(_one_of([]), "absent", "tools are not supported"),
    "tool_choice": Field(_one_of("none"), '"none"', "tools are not supported"),
}


def check_fields(body: Any, fields: Mapping[str, Field]) -> dict[str, Any]:
    """The body's fields that are not null. Raises RequestError naming the first that is unknown or not allowed."""
    if not isinstance(body, dict):
        raise RequestError("the request body is not a JSON object")
    for name, value in body.items():
        field = fields.get(name)
        if field is None:
            near = difflib.get_close_matches(name, fields, n=1)
            raise RequestError(f"unknown field {_shown(name)}" + (f", did you mean {near[0]!r}?" if near else ""))
        if value is not None and not field.check(value):
            reason = f": {field.why}" if field.why else ""
            raise RequestError(f"{name} is {_shown(value)}, expected {field.expected}{reason}")
    return {name: value for name, value in body.items() if value is not None}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
