"""What serve and generate may say about how a model is loaded and run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

DIRECTORY = click.Path(path_type=Path)
DEVICES = click.Choice(["auto", "cpu", "cuda"])


class CountOr(click.ParamType[int | str]):
    """A number of something, or a word."""

    def __init__(self, name: str, word: str) -> None:
        self.name, self.word = name, word

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> int | str:
        """As click calls it."""
        if value == self.word or isinstance(value, int):
            return str(value) if value == self.word else int(value)
        try:
            return click.IntRange(0).convert(value, parameter, context)
        except click.BadParameter:
            self.fail(f"{value!r} is neither a number of {self.name} nor {self.word}", parameter, context)


POSITIONS = CountOr("prompt positions", "all")


def loading_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds these options to a command; their names are those of SessionOptions (decoder/cpu/session.py)."""
    options = (
        click.option(
            "--num-speculative-tokens", type=CountOr("drafts", "auto"), default=3, show_default=True, metavar="K|auto",
            help="Drafts a step; auto: chosen by recent acceptance. Output unchanged.",
        ),
        click.option(
            "--draft-vocab", type=DIRECTORY, metavar="FILE", help="Draft only these tokens (JSON). Output unchanged."
        ),
        click.option(
            "--draft-window", type=POSITIONS, metavar="N|all",
            help="Draft from a prompt's last N positions. Output unchanged. [default: 1024 or more; all on a card]",
        ),
        click.option(
            "--draft-context", type=POSITIONS, metavar="N|all",
            help="Of these, how many are finished for the drafts. Output unchanged. [default: 512; all on a card]",
        ),
        click.option("--device", type=DEVICES, default="auto", show_default=True),
        click.option("--quantize", type=click.Choice(["fp8"]), help="On a card: bf16 linears become FP8 as they load."),
        click.option(
            "--prefill-dtype", type=click.Choice(["bf16", "fp8"]), default="bf16", show_default=True,
            help="On a card: products that read the prompt; fp8 from 1,024 tokens a pass on.",
        ),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command
