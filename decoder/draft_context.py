"""What the MTP head reads of a prompt, and what that costs: the draft window and the draft context.

Window: the head's keys and values begin W positions before a prompt's end; every draft attends to all that it has, so a
window makes drafts of a long prompt faster and, where the text repeats what lies further back, somewhat worse.

Context: the output needs the last layer's attention (or whatever its mixer is) for one row of a prompt, the last. For
all other rows it is there to give the MTP head their hidden states, from which that makes keys and values. So with a
draft context of N, the last N positions are finished; earlier ones of the window go through the last layer without its
mixer, MLP and final norm as ever. The mixer's own state (keys and values, or a GDN state) is made of every position.

Both are about the quality of guesses and about time, never about the output. What they do to either on real text is
measured by `python -m kernarc.decoder.bench.draft_context`; native/NOTES.md has the figures behind the defaults.
"""

from __future__ import annotations

from typing import NamedTuple

from .checkpoint.config import ModelConfig
from .errors import RequestError

ALL = "all"  # as a window or a context: the whole prompt
CPU_DRAFT_CONTEXT = 512
CPU_LEAST_WINDOW = 1024
_WINDOW_SHARE = 5  # a window's keys and values are a fifth of the weights that a draft reads


class DraftReading(NamedTuple):
    """Resolved for a device: positions counted from a prompt's end, None for all of them."""

    window: int | None = None
    context: int | None = None


WHOLE_PROMPT = DraftReading()
NOTHING = DraftReading(0, 0)  # but a prompt's last position, from which the first token comes


def first_position(prompt_tokens: int, count: int | None) -> int:
    """Where the last `count` positions of a prompt begin, its very last one always among them. None: all positions."""
    return 0 if count is None else max(0, prompt_tokens - max(1, count))


def cpu_window(config: ModelConfig) -> int:
    """The default window on a CPU: with a model's size the time of its drafts depends less and less on it."""
    hidden, kv_width = config.hidden_size, config.num_key_value_heads * config.head_dim
    mixer = hidden * (3 * config.num_attention_heads * config.head_dim + 2 * kv_width)
    weights = mixer + hidden * (3 * config.intermediate_size + hidden + config.vocab_size)
    return max(CPU_LEAST_WINDOW, weights // _WINDOW_SHARE // (2 * kv_width))


def resolve_reading(
    window: int | str | None, context: int | str | None, device: str, config: ModelConfig
) -> DraftReading:
    """What a session on `device` is given; None asks for the device's default.

    Raises RequestError for a value that means nothing, and for one that the device does not have.
    """
    for name, asked in (("window", window), ("context", context)):
        if asked not in (None, ALL) and not (isinstance(asked, int) and asked >= 0):
            raise RequestError(f"the draft {name} is {asked!r}, expected {ALL} or at least 0 prompt positions")
        if device != "cpu" and isinstance(asked, int):
            raise RequestError(
                f"the draft {name} is {asked}, but on a card the MTP head reads the whole prompt, finished",
                f"leave it out there, or say {ALL}",
            )
    if device != "cpu":
        return DraftReading()
    return DraftReading(
        cpu_window(config) if window is None else _positions(window),
        CPU_DRAFT_CONTEXT if context is None else _positions(context),
    )


def _positions(asked: int | str) -> int | None:
    return asked if isinstance(asked, int) else None
