"""One case of the suite: a behaviour of a server, how to ask for it, and what a right client makes of it."""

from dataclasses import dataclass

from .shape import Shape


@dataclass(frozen=True)
class Refusal:
    """An answer with no stream, given before the first real one."""

    status: int
    message: str


@dataclass(frozen=True)
class Case:
    """threads names the public threads in which users met the fault.

    void: words of what a right client says of the stream; None where it is to be used, with the truth log's figures.
    max_tokens: to ask for, where that is not the shape's tokens. max_tokens_per_step: what the client is told,
    None where it is to find out whether events are steps.
    Limits are those to run the case under, in seconds.
    """

    name: str
    says: str
    shape: Shape
    threads: str = ""
    void: str | None = None
    knows_steps: bool = True
    prompt_tokens: int = 32
    max_tokens: int | None = None
    max_tokens_per_step: int | None = 1
    ignore_eos: bool = True
    void_on_repetition: bool = True
    requests: int = 1
    pause_s: float = 0.0
    first_token_limit_s: float = 30.0
    stall_limit_s: float = 10.0
    stream_limit_s: float = 60.0
    refusals: tuple[Refusal, ...] = ()
    refused_field: str | None = None
    closes_without_answer: bool = False
    closes_after_answer: bool = False
    caches_prompts: bool = False

    @property
    def asked_tokens(self) -> int:
        """max_tokens of the request."""
        return self.shape.tokens if self.max_tokens is None else self.max_tokens
