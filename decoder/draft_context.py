"""What the MTP head reads of a prompt, and what that costs the first token.

The output needs the last layer's attention (or whatever its mixer is) for one row of a prompt, the last. For all other
rows it is there to give the MTP head their hidden states, from which that makes keys and values: for the quality of its
guesses, never for the output. So with a draft context of N, the last N positions are finished; earlier ones go through
the last layer without its mixer, MLP and final norm as ever. The mixer's own state (keys and values, or a GDN state) is
made of every position. `python -m kernarc.decoder.draft_context_bench` measures the guesses.
"""

from __future__ import annotations

from .errors import RequestError

ALL = "all"  # as a draft context: the whole prompt
CPU_DRAFT_CONTEXT = 512  # native/NOTES.md has what it costs and saves


def skipped_rows(start: int, rows: int, prompt_tokens: int, draft_context: int | None) -> int:
    """Of a prompt's rows start … start + rows − 1, how many go without the last mixer. None: no row does.

    The prompt's last row never does: the first token comes from it.
    """
    if draft_context is None:
        return 0
    return min(max(0, prompt_tokens - max(1, draft_context) - start), rows)


def resolve_draft_context(asked: int | str | None, device: str) -> int | None:
    """What a session on `device` is given: None for the whole prompt. asked: None for the device's default.

    Raises RequestError for a value that means nothing, and for one that the device does not have.
    """
    if asked not in (None, ALL) and not (isinstance(asked, int) and asked >= 0):
        raise RequestError(f"the draft context is {asked!r}, expected {ALL} or at least 0 prompt positions")
    if device == "cpu":
        return CPU_DRAFT_CONTEXT if asked is None else _positions(asked)
    if isinstance(asked, int):
        raise RequestError(
            f"the draft context is {asked}, but on a card every position of a prompt is finished",
            f"leave it out there, or say {ALL}",
        )
    return None


def _positions(asked: int | str) -> int | None:
    return asked if isinstance(asked, int) else None
