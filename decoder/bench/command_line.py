"""What the benches and checks of this folder share on the command line: lists of numbers and names, a card, errors."""

import argparse
import sys
from collections.abc import Callable, Sequence

import torch

from ..cuda.limits import MAX_DRAFTS, check_card
from ..errors import DecoderError


def counts(text: str) -> list[int]:
    """An argparse type: `128,8192` → [128, 8192], one at least, each above 0."""
    found = _whole_numbers(text)
    if found is None or not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers above 0, as 128,8192 is")
    return found


def draft_counts(text: str) -> list[int]:
    """An argparse type: `0,3` → [0, 3]; empty for none."""
    found = _whole_numbers(text)
    if found is None or max(found, default=0) > MAX_DRAFTS or min(found, default=0) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of draft counts from 0 to {MAX_DRAFTS}, as 0,3 is")
    return found


def _whole_numbers(text: str) -> list[int] | None:
    try:
        return [int(item) for item in text.split(",") if item.strip()]
    except ValueError:
        return None


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """An argparse type: `a,b` → ["a", "b"], each one of `known`."""

    def names(text: str) -> list[str]:
        found = [item.strip() for item in text.split(",")]
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return found

    return names


def require_card() -> torch.device:
    """The card; to be called after the options are parsed. Raises DecoderError where none runs these kernels."""
    try:
        check_card(torch.device("cuda", 0))
    except DecoderError as error:
        hint = "This runs on a card alone; `python -m kernarc.decoder.bench.cpu` measures the decoder on a CPU."
        raise DecoderError(error.message, hint) from None
    return torch.device("cuda", torch.cuda.current_device())


def exit_with(main: Callable[[], int | None]) -> None:
    """Exit with what `main` returns; what is expected to fail says so in a line, and exits with 2."""
    try:
        with torch.inference_mode():
            code = main()
    except DecoderError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)
