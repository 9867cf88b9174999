"""A request body, checked, as what the decoder is to do."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ..checkpoint.tokenizer import TextTokenizer
from ..errors import RequestError
from .request_fields import CHAT_FIELDS, COMPLETION_FIELDS, check_fields, is_int


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to decode and how its stream is to look."""

    prompt_ids: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    return_token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    is_chat: bool = False


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a request is checked against. names: every name it may be asked for, the first its own."""

    names: tuple[str, ...]
    vocab_size: int
    max_context: int
    tokenizer: TextTokenizer | None


class UnknownModelError(RequestError):
    """A request for a model this server does not have."""


def parse_json(body: bytes) -> Any:
    """JSON of a request. Raises RequestError for anything that is not strict JSON in UTF-8."""
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise RequestError("the request body is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from None


def parse_completion(body: Any, model: ServedModel) -> GenerationRequest:
    """A /v1/completions body. Raises RequestError."""
    fields = check_fields(body, COMPLETION_FIELDS)
    _check_model(fields, model.names)
    if "prompt" not in fields:
        raise RequestError("the request has no prompt", "send a string or a list of token ids")
    prompt_ids = _prompt_ids(fields["prompt"], model, add_special_tokens=fields.get("add_special_tokens", True))
    return _generation(fields, prompt_ids, fields.get("max_tokens"), model, is_chat=False)


def parse_chat(body: Any, model: ServedModel) -> GenerationRequest:
    """A /v1/chat/completions body. Raises RequestError, also where the checkpoint has no chat template."""
    fields = check_fields(body, CHAT_FIELDS)
    _check_model(fields, model.names)
    if "messages" not in fields:
        raise RequestError("the request has no messages")
    if model.tokenizer is None or model.tokenizer.chat_template is None:
        raise RequestError("this checkpoint has no chat template", "use /v1/completions")
    text = model.tokenizer.chat_template.render(
        fields["messages"],
        add_generation_prompt=fields.get("add_generation_prompt", True),
        **fields.get("chat_template_kwargs", {}),
    )
    prompt_ids = model.tokenizer.encode(text, add_special_tokens=False)
    limit = fields.get("max_completion_tokens", fields.get("max_tokens"))
    return _generation(fields, prompt_ids, limit, model, is_chat=True)


def _generation(
    fields: Mapping[str, Any], prompt_ids: list[int], limit: int | None, model: ServedModel, *, is_chat: bool
) -> GenerationRequest:
    if fields.get("stop") and model.tokenizer is None:
        raise RequestError("this checkpoint has no tokenizer, so stop strings cannot be found", "use stop_token_ids")
    _check_ids(fields.get("stop_token_ids", ()), model.vocab_size, "stop_token_ids")
    options = fields.get("stream_options", {})
    stop = fields.get("stop", ())
    return GenerationRequest(
        prompt_ids=tuple(prompt_ids),
        max_tokens=_max_tokens(len(prompt_ids), limit, model.max_context),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(fields.get("stop_token_ids", ())),
        ignore_eos=fields.get("ignore_eos", False),
        skip_special_tokens=fields.get("skip_special_tokens", True),
        stream=fields.get("stream", False),
        return_token_ids=fields.get("return_token_ids", False),
        include_usage=options.get("include_usage", False),
        continuous_usage=options.get("continuous_usage_stats", False),
        is_chat=is_chat,
    )


def _prompt_ids(prompt: Any, model: ServedModel, *, add_special_tokens: bool) -> list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, list):
        if not {str, list}.isdisjoint(map(type, prompt)):
            raise RequestError("the request holds several prompts, expected one", "send a request for each")
        _check_ids(prompt, model.vocab_size, "prompt")
        return prompt
    if not prompt:
        raise RequestError("the prompt is empty", "send at least one token")
    if model.tokenizer is None:
        raise RequestError("this checkpoint has no tokenizer, so it takes no text", "send the prompt as token ids")
    return model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)


def _check_ids(ids: Collection[Any], vocab_size: int, field: str) -> None:
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return  # the common case, fast for long prompts
    for position, token in enumerate(ids):
        if not is_int(token):
            raise RequestError(f"{field}[{position}] is {str(token)[:40]!r}, expected a token id")
        if not 0 <= token < vocab_size:
            raise RequestError(f"{field}[{position}] is {str(token)[:40]}, expected an id from 0 to {vocab_size - 1}")


def _max_tokens(prompt_tokens: int, limit: int | None, max_context: int) -> int:
    if not prompt_tokens:
        raise RequestError("the prompt is empty", "send at least one token")
    left = max_context - prompt_tokens
    if left < 1:
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens, and the window of {max_context} leaves none for output",
            f"send at most {max_context - 1} tokens",
        )
    if limit is not None and limit > left:
        raise RequestError(
            f"max_tokens is {str(limit)[:40]}; {prompt_tokens} prompt tokens leave {left} of a window of {max_context}",
            f"ask for at most {left}, or leave max_tokens out",
        )
    return left if limit is None else limit


def _check_model(fields: Mapping[str, Any], names: tuple[str, ...]) -> None:
    if "model" in fields and fields["model"] not in names:
        raise UnknownModelError(f"no model {fields['model'][:200]!r} is served here", f"this server has {names[0]!r}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
