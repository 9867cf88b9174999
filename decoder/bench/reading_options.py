"""The options of the CPU benches that say what drafts read of a prompt (draft_context.py)."""

from collections.abc import Callable
from typing import Any

import click


def reading_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --draft-window and --draft-context, each a number of positions or absent."""
    of_window = "Of these, how many are finished; a large number for all."
    command = click.option("--draft-context", type=click.IntRange(0), help=of_window)(command)
    of_prompt = "Last positions of a prompt that drafts read; a large number for all."
    return click.option("--draft-window", type=click.IntRange(0), help=of_prompt)(command)
