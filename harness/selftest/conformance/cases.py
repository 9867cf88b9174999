"""Every case by name."""

from .case import Case
from .shape import Shape
from .token_cases import COUNTING, FIRST_TOKEN, USAGE
from .transport_cases import BROKEN, WIRE

DEEP_PROMPT_TOKENS = 65_536


def _steady(ms_per_token: float, tokens: int, prompt_tokens: int = 32) -> Case:
    depth = "" if prompt_tokens < DEEP_PROMPT_TOKENS else "-64k"
    return Case(
        f"steady-{ms_per_token:g}ms{depth}",
        f"{ms_per_token:g} ms a token, {prompt_tokens:,} prompt tokens: how late this client's stamps are",
        Shape(tokens=tokens, ms_per_token=ms_per_token, first_token_ms=300.0),
        prompt_tokens=prompt_tokens,
    )


TIMING = (
    _steady(0.2, 5000),
    _steady(1.0, 1500),
    _steady(10.0, 150),
    _steady(0.2, 5000, DEEP_PROMPT_TOKENS),
    _steady(1.0, 1500, DEEP_PROMPT_TOKENS),
    _steady(10.0, 150, DEEP_PROMPT_TOKENS),
)

CASES: dict[str, Case] = {case.name: case for case in (*COUNTING, *FIRST_TOKEN, *USAGE, *BROKEN, *WIRE, *TIMING)}
