"""Tokenizers and chat templates give what the tokenizers and transformers libraries give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kernarc.decoder.checkpoint.chat_template import ChatTemplate
from kernarc.decoder.checkpoint.tokenizer import TextTokenizer
from kernarc.decoder.errors import CheckpointError, RequestError
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from ...fakes.live_server import TEXT, small_tokenizer

# What Qwen's template leans on: loops with control, namespaces, tojson, strip, special tokens, trimmed blocks.
TEMPLATE = """\
{%- set state = namespace(last=none) %}
{% for message in messages %}
    {% if loop.index0 > 8 %}{% break %}{% endif %}
    {% if message.role == 'assistant' %}
{% generation %}<|im_start|>assistant
{{ message.content | trim }}{{ eos_token }}{% endgeneration %}
    {% else %}
{{ '<|im_start|>' + message.role + '\\n' + message.content + eos_token + '\\n' }}
    {%- endif %}
    {% set state.last = message %}
{% endfor %}
{{ {"é": [1, "<b>"]} | tojson }} {{ enable_thinking | default(true) }}
{%- if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
{{ state.last.role }}"""

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "naïve 日本 <b>&amp;"},
    {"role": "assistant", "content": "  yes \n"},
    {"role": "user", "content": "why?"},
]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|end|>"}, "chat_template": TEMPLATE, "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("extra", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_chat_renders_as_in_transformers(directory: Path, extra: dict[str, Any], add_generation_prompt: bool) -> None:
    library = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), eos_token="<|end|>", chat_template=TEMPLATE
    )
    expected = library.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt, **extra
    )
    template = ChatTemplate.from_directory(directory)
    assert template is not None
    assert template.render(MESSAGES, add_generation_prompt=add_generation_prompt, **extra) == expected


def test_a_template_file_wins_over_the_config(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ messages | length }}")
    template = ChatTemplate.from_directory(directory)
    assert template is not None
    assert template.render(MESSAGES, add_generation_prompt=True) == "4"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(source: str) -> None:
    with pytest.raises(RequestError, match=r"unsafe|refuses"):
        ChatTemplate(source, {}).render(MESSAGES, add_generation_prompt=True)


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(CheckpointError, match="does not compile"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize("text", TEXT)
def test_ids_are_those_of_the_library(directory: Path, text: str) -> None:
    tokenizer = TextTokenizer.from_directory(directory)
    assert tokenizer is not None
    ids = tokenizer.encode(text, add_special_tokens=True)
    assert ids == small_tokenizer().encode(text).ids
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids).decode() == text == tokenizer.decode(ids)


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    assert TextTokenizer.from_directory(tmp_path) is None


def test_tokenizers_it_cannot_stream_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        TextTokenizer.from_directory(tmp_path)
    wordpiece = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    wordpiece.decoder = decoders.WordPiece()
    wordpiece.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="its decoder is 'WordPiece', expected 'ByteLevel'"):
        TextTokenizer.from_directory(tmp_path)
