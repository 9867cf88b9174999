"""One sequence in plain PyTorch: prefill in chunks, then draft, verify, commit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cancellation import raise_if_cancelled
from ..checkpoint.config import ModelConfig
from ..checkpoint.draft_vocabulary import DraftVocabulary
from ..draft_context import NOTHING, WHOLE_PROMPT, DraftReading, first_position
from .attention import Rope
from .cache import KeyValueCache, SequenceState
from .model import Model, Weights
from .mtp import MtpHead

PREFILL_ROWS = 512  # prompt tokens read in one forward
# A step of a smaller model runs on one thread: its products are so short that two threads mostly wait for each other,
# and whoever reads the stream wants a core too. Served on two cores with 4 million weights: 1.6 ms a token, not 3.6.
_ONE_THREAD_WEIGHTS = 20_000_000
_BACKLOG_LIMIT = 16  # steps without drafts after which the MTP head catches up


class TorchSession:
    """A Session (generate.py) on one device."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        max_context: int,
        device: str = "cpu",
        draft_vocabulary: DraftVocabulary | None = None,
        reading: DraftReading = WHOLE_PROMPT,
    ) -> None:
        """weights: Checkpoint tensors in fp32, with the `mtp.` ones if drafts are wanted; emptied here.

        draft_vocabulary: the tokens that may be drafted, all of them unless given. reading: what the MTP head reads of
        a prompt. Neither ever changes the output.
        """
        self._prefill_threads = torch.get_num_threads()
        is_small = sum(weight.numel() for weight in weights.values()) < _ONE_THREAD_WEIGHTS
        self._step_threads = 1 if is_small else self._prefill_threads
        rope = Rope(config, max_context, device)
        self.mtp = MtpHead(config, weights, rope) if "mtp.fc.weight" in weights else None
        self.model = Model(config, weights, rope)
        self.reading = NOTHING if self.mtp is None else reading
        self._draft_ids: torch.Tensor | None = None  # [R], the token of each row of the draft head
        if draft_vocabulary is not None:
            self._draft_ids = draft_vocabulary.rows(1, config.vocab_size).to(device)
            self._draft_head = self.model.head.index_select(1, self._draft_ids)  # [H, R]
        self.state = SequenceState.empty(config, device)
        self.mtp_cache = KeyValueCache(config, device)
        self.device = device
        self.context_length = 0
        self._mtp_length = 0  # see mtp_length
        self._last_token = 0  # emitted, not yet read by the model
        # committed positions that the MTP head has not read yet: (next tokens [R], true hidden states [R, H])
        self._backlog: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.inference_mode()
    def prefill(self, prompt_ids: Sequence[int]) -> int:
        """Reset, read the whole prompt, return the first greedy token."""
        torch.set_num_threads(self._prefill_threads)
        self.mtp_cache.origin = self._mtp_length = first_position(len(prompt_ids), self.reading.window)
        finished = max(self.mtp_origin, first_position(len(prompt_ids), self.reading.context))
        self.state.reset(len(prompt_ids))
        self.mtp_cache.allocate(len(prompt_ids) - self.mtp_origin)
        prompt = torch.tensor(prompt_ids, device=self.device)
        for start in range(0, len(prompt), PREFILL_ROWS):
            raise_if_cancelled()
            token_ids = prompt[start : start + PREFILL_ROWS]
            skipped = min(max(0, finished - start), len(token_ids))
            hidden = self.model.forward(token_ids, self.state, start, skipped)  # [R, H]
            self.state.commit(len(token_ids))
            unread = max(0, self.mtp_origin - start)
            following = prompt[start + unread + 1 : start + len(token_ids) + 1]
            if self.mtp is not None and len(following):
                self._read_mtp(following, hidden[unread : unread + len(following)])
        self.context_length = len(prompt)
        first = self.model.logits(hidden[-1:]).argmax(-1)  # [1]
        self._backlog = [(first, hidden[-1:])]
        self._last_token = int(first)
        torch.set_num_threads(self._step_threads)
        return self._last_token

    @torch.inference_mode()
    def step(self, num_drafts: int) -> tuple[list[int], int]:
        """Draft, verify, commit: (1 … num_drafts + 1 new tokens, how many of them were drafts)."""
        drafts = self.draft(num_drafts)
        token_ids = torch.tensor([self._last_token, *drafts], device=self.device)  # [k + 1]
        hidden = self.model.forward(token_ids, self.state, self.context_length)  # [k + 1, H]
        predicted = self.model.logits(hidden).argmax(-1)  # [k + 1], what follows each row
        tokens = predicted.tolist()
        accepted = 0
        while accepted < num_drafts and drafts[accepted] == tokens[accepted]:
            accepted += 1
        kept = accepted + 1
        self.state.commit(kept)
        self.context_length += kept
        if self.mtp is not None:
            self._backlog.append((predicted[:kept], hidden[:kept]))
        self._last_token = tokens[accepted]
        return tokens[:kept], accepted

    def draft(self, num_drafts: int) -> list[int]:
        """Guess x_{n+1} … x_{n+k} after the unread token x_n (n = context_length) by recursion of the MTP head."""
        if num_drafts == 0:
            if len(self._backlog) >= _BACKLOG_LIMIT:
                self._read_backlog()
            return []
        assert self.mtp is not None, "only a session with an MTP head drafts"
        hidden = self._read_backlog()[-1:]  # [1, H], the head at position n − 1
        drafts = [self._drafted_token(hidden)]
        for position in range(self.context_length, self.context_length + num_drafts - 1):
            hidden = self.mtp.forward(self.model.embed(drafts[-1]), hidden, self.mtp_cache, position)
            drafts.append(self._drafted_token(hidden))
        return torch.cat(drafts).tolist()

    def _drafted_token(self, hidden: torch.Tensor) -> torch.Tensor:
        """The likeliest token of the draft vocabulary, [1, H] → [1]."""
        if self._draft_ids is None:
            return self.model.logits(hidden).argmax(-1)
        return self._draft_ids[(hidden @ self._draft_head).argmax(-1)]

    @property
    def mtp_length(self) -> int:
        """The position up to which MTP keys and values are a prompt's or come from true hidden states."""
        return self._mtp_length

    @property
    def mtp_origin(self) -> int:
        """The position whose MTP keys and values lie first."""
        return self.mtp_cache.origin

    def _read_backlog(self) -> torch.Tensor:
        """Re-run the head where tokens were accepted, now with true hidden states, over the drafted keys and values."""
        tokens, hidden = (torch.cat(parts) for parts in zip(*self._backlog, strict=True))
        self._backlog = []
        return self._read_mtp(tokens, hidden)

    def _read_mtp(self, next_tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Run the head over the next committed positions: [R], [R, H] → [R, H]."""
        assert self.mtp is not None, "only a session with an MTP head drafts"
        start = self._mtp_length
        self._mtp_length += len(next_tokens)
        return self.mtp.forward(self.model.embed(next_tokens), hidden, self.mtp_cache, start)
