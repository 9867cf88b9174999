"""Greedy speculative generation: the loop, and the session it drives."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from .checkpoint.config import ModelConfig
from .draft_length import AdaptiveLength, DraftLength, FixedLength, measure_step_ms, timed_tokens
from .errors import DecoderError, RequestError
from .session import AUTO, RunsAhead, Session, SessionOptions, check_drafts, most_drafts, open_session

AUTO_COUNTS = (0, 1, 2, 3, 4, 6, 8)  # drafts a step that AUTO chooses among
AUTO_START = 3
_TIMED_PROMPT = 16


@dataclass(frozen=True, slots=True)
class Step:
    """One decoder step as the caller sees it.

    token_ids: the new tokens, at least one. drafted: drafts verified in this step. accepted: drafts among `token_ids`,
    counted after trimming at a stop token or at max_tokens.
    """

    token_ids: tuple[int, ...]
    drafted: int
    accepted: int


class Decoder:
    """Weights and one session, loaded once; generates one sequence at a time."""

    def __init__(
        self,
        config: ModelConfig,
        session: Session,
        *,
        device: str,
        max_context: int,
        num_speculative_tokens: int,
        step_ms: Mapping[int, float] | None = None,
    ) -> None:
        """num_speculative_tokens: the most drafts of a step. step_ms: where given, drafts are chosen by it step by step
        (draft_length.py), else they are always that many."""
        self.config = config
        self.session = session
        self.device = device
        self.max_context = max_context
        self.num_speculative_tokens = num_speculative_tokens
        self.step_ms = step_ms
        self.eos_token_ids = config.eos_token_ids
        self._generation = 0  # which generate() owns the session

    @classmethod
    def load(cls, model_dir: str | Path, **options: Any) -> Self:
        """Load a checkpoint directory; the options are those of SessionOptions (sessions.py).

        Raises CheckpointError for the checkpoint, RequestError for a setting outside its range.
        """
        config = ModelConfig.from_directory(model_dir)
        if options.get("draft_vocab") is not None:
            options["draft_vocab"] = Path(options["draft_vocab"])
        asked = SessionOptions(**options)
        session, device, max_context = open_session(Path(model_dir), config, asked)
        step_ms = _timed_steps(session, max_context) if asked.is_adaptive else None
        return cls(
            config,
            session,
            device=device,
            max_context=max_context,
            num_speculative_tokens=_most_asked(asked, session, step_ms is not None),
            step_ms=step_ms,
        )

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        num_speculative_tokens: int | str | None = None,
        ignore_eos: bool = False,
        stop_token_ids: Collection[int] = (),
    ) -> Iterator[Step]:
        """Greedy tokens after the prompt, a Step at a time, to a stop token (emitted), max_tokens or the window's end.

        max_tokens None means what the window leaves. Drafts never change the tokens, only how many come a step.
        Raises RequestError at once, not at the first step, for a request that cannot be served.
        """
        length = self._draft_length(num_speculative_tokens)
        self._check_prompt(prompt_ids)
        room = self.max_context - len(prompt_ids)
        if max_tokens is not None and max_tokens < 1:
            raise RequestError(f"max_tokens is {max_tokens}, expected at least 1")
        limit = room if max_tokens is None else min(max_tokens, room)
        stops = frozenset(stop_token_ids) if ignore_eos else self.eos_token_ids | frozenset(stop_token_ids)
        self._generation += 1
        return self._steps(prompt_ids, limit, length, stops, self._generation)

    def _draft_length(self, asked: int | str | None) -> DraftLength:
        check_drafts(self.num_speculative_tokens if asked is None else asked, self.num_speculative_tokens > 0)
        if isinstance(asked, int):
            if asked > (most := most_drafts(self.session)):
                raise RequestError(
                    f"num_speculative_tokens is {asked}, a step holds {most} on this card", "ask for fewer"
                )
            return FixedLength(asked)
        if self.step_ms is not None:
            return AdaptiveLength(self.step_ms, max(count for count in self.step_ms if count <= AUTO_START))
        if asked == AUTO:
            raise RequestError("this decoder was not loaded to choose its drafts", "load it with the same setting")
        return FixedLength(self.num_speculative_tokens)

    def _steps(
        self, prompt_ids: Sequence[int], limit: int, length: DraftLength, stops: frozenset[int], generation: int
    ) -> Iterator[Step]:
        """The loop: prefill, then draft, verify and commit until something ends it."""
        self._check_owner(generation)
        new, drafted, accepted = [self.session.prefill(prompt_ids)], 0, 0
        remaining = limit
        session = self.session
        ahead = session if isinstance(session, RunsAhead) else None
        while True:
            token_ids = _until_stop(new[:remaining], stops)
            remaining -= len(token_ids)
            yield Step(token_ids, drafted, min(accepted, len(token_ids)))
            if remaining == 0 or token_ids[-1] in stops:
                return
            self._check_owner(generation)
            window_left = self.max_context - session.context_length - 1  # tokens that may still be emitted
            drafted = min(length.choose(), window_left - 1)
            new, accepted = session.step(drafted)
            drafted = drafted if ahead is None else ahead.drafted
            length.observe(drafted, accepted)

    def _check_owner(self, generation: int) -> None:
        if generation != self._generation:
            raise DecoderError("another generate() took over this decoder", "Finish one sequence before the next.")

    def _check_prompt(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise RequestError("the prompt is empty", "Send at least one token.")
        if len(prompt_ids) >= self.max_context:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens, the context holds {self.max_context} with the output",
                f"Send at most {self.max_context - 1} tokens.",
            )
        if set(map(type, prompt_ids)) == {int} and min(prompt_ids) >= 0 and max(prompt_ids) < self.config.vocab_size:
            return  # the common case, fast for long prompts
        for position, token_id in enumerate(prompt_ids):
            if not 0 <= token_id < self.config.vocab_size:
                raise RequestError(f"prompt token {position} is {token_id}, expected 0 … {self.config.vocab_size - 1}")


def _most_asked(asked: SessionOptions, session: Session, is_timed: bool) -> int:
    """The most drafts of a step; where they were to be chosen but could not be timed, a fixed number."""
    if not asked.is_adaptive:
        return asked.max_drafts
    return min(asked.max_drafts if is_timed else AUTO_START, most_drafts(session))


def _timed_steps(session: Session, max_context: int) -> dict[int, float] | None:
    """Milliseconds of a step by its drafts; None where the window is too small to time them."""
    counts = [count for count in AUTO_COUNTS if count <= most_drafts(session)]
    if _TIMED_PROMPT + timed_tokens(counts) > max_context:
        return None
    return measure_step_ms(session, counts, prompt_tokens=_TIMED_PROMPT)


def _until_stop(token_ids: Sequence[int], stops: frozenset[int]) -> tuple[int, ...]:
    """The tokens up to and with the first stop token."""
    for index, token_id in enumerate(token_ids):
        if token_id in stops:
            return tuple(token_ids[: index + 1])
    return tuple(token_ids)
