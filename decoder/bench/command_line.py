"""What the benches and checks of this folder share on the command line: lists of numbers and names, a card, errors."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import click
import torch

from ..cuda.limits import MAX_DRAFTS, check_card
from ..errors import DecoderError


class Counts(click.ParamType[list[int]]):
    """`128,8192` → [128, 8192], one at least, each above 0."""

    name = "counts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """Reads the list."""
        if isinstance(value, list):
            return value
        found = _whole_numbers(value)
        if found is None or not found or min(found) < 1:
            self.fail(f"{value!r} is no list of whole numbers above 0, as 128,8192 is", param, ctx)
        return found


class DraftCounts(click.ParamType[list[int]]):
    """`0,3` → [0, 3]; empty for none."""

    name = "counts"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """Reads the list."""
        if isinstance(value, list):
            return value
        found = _whole_numbers(value)
        if found is None or max(found, default=0) > MAX_DRAFTS or min(found, default=0) < 0:
            self.fail(f"{value!r} is no list of draft counts from 0 to {MAX_DRAFTS}, as 0,3 is", param, ctx)
        return found


class NamesOf(click.ParamType[list[str]]):
    """`a,b` → ["a", "b"], each one of `known`."""

    name = "names"

    def __init__(self, known: Sequence[str]) -> None:
        self.known = known

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[str]:
        """Reads the list."""
        if isinstance(value, list):
            return value
        found = [item.strip() for item in value.split(",")]
        for name in found:
            if name not in self.known:
                self.fail(f"{name!r} is none of {', '.join(self.known)}", param, ctx)
        return found


def _whole_numbers(text: str) -> list[int] | None:
    try:
        return [int(item) for item in text.split(",") if item.strip()]
    except ValueError:
        return None


COUNTS, DRAFT_COUNTS = Counts(), DraftCounts()


def rows_option(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Adds --rows, the row counts to time."""
    return click.option("--rows", "row_counts", type=COUNTS, default=default)


def require_card() -> torch.device:
    """The card; to be called after the options are parsed. Raises DecoderError where none runs these kernels."""
    try:
        check_card(torch.device("cuda", 0))
    except DecoderError as error:
        hint = "This runs on a card alone; `python -m kernarc.decoder.bench.cpu` measures the decoder on a CPU."
        raise DecoderError(error.message, hint) from None
    return torch.device("cuda", torch.cuda.current_device())


def on_card(function: Callable[..., None]) -> Callable[..., None]:
    """Without gradients; what is expected to fail says so in a line, and exits with 2."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            with torch.inference_mode():
                function(*args, **kwargs)
        except DecoderError as error:
            click.echo(f"error: {error}", err=True)
            raise SystemExit(2) from None

    return run
