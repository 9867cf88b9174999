"""Chat prompts of an exact depth: the server's template wraps them, so the wrapped length is measured and trimmed."""

import re
from collections.abc import Callable

from ..errors import VoidMeasurementError
from .client import StreamingClient
from .completion import ChatMessage

_PIECE = re.compile(r"\s*\S+")


def fit_chat_prompt(client: StreamingClient, model: str, text: str, depth: int) -> tuple[ChatMessage, ...]:
    """One user message, cut from the start of `text`, that the server's template makes exactly `depth` tokens.

    Asks the server's /tokenize about a dozen times; nothing is generated, so no cache is warmed. Raises
    VoidMeasurementError where the server has none, or no cut gives the depth.
    """

    def wrapped_length(content: str) -> int:
        messages = [{"role": "user", "content": content}]
        answer = client.ask("/tokenize", {"model": model, "messages": messages, "add_generation_prompt": True})
        count = answer.get("count") if isinstance(answer, dict) else None
        if not isinstance(count, int):
            raise VoidMeasurementError(
                "the server has no /tokenize that counts a chat prompt, so its depth cannot be trimmed",
                "measure with prompt ids (/v1/completions), or give prompts whose wrapped length is known",
            )
        return count

    ends = [match.end() for match in _PIECE.finditer(text)]
    words = _longest(len(ends), lambda k: wrapped_length(text[: ends[k - 1]] if k else ""), depth)
    start = ends[words - 1] if words else 0
    stop = ends[words] if words < len(ends) else len(text)
    extra = _longest(stop - start, lambda k: wrapped_length(text[: start + k]), depth)  # inside the next word
    content = text[: start + extra]
    length = wrapped_length(content)
    if length != depth:
        raise VoidMeasurementError(
            f"no cut of the text gives a chat prompt of {depth} tokens: the nearest has {length}",
            "give a longer text, or a depth above the length of the template alone",
        )
    return (ChatMessage("user", content),)


def _longest(most: int, length_of: Callable[[int], int], depth: int) -> int:
    """The largest k in 0…most whose length does not exceed depth, by bisection; 0 where even that is too long."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if length_of(middle) <= depth:
            low = middle
        else:
            high = middle - 1
    return low
