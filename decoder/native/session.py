"""One sequence decoded by the C++: the same interface and arithmetic order for every number of drafts."""

from __future__ import annotations

import array
import ctypes
import weakref
from collections.abc import Sequence

import torch

from ..cancellation import raise_if_cancelled
from ..checkpoint.config import ModelConfig
from ..checkpoint.draft_vocabulary import DraftVocabulary
from ..draft_context import NOTHING, WHOLE_PROMPT, DraftReading, first_position
from .build import NativeUnavailableError
from .state import NativeKeyValueCache, NativeState
from .weights import NativeWeights

MAX_PREFILL_THREADS = 16  # barriers between short phases: more gain nothing
_BACKLOG_LIMIT = 16  # steps without drafts after which the MTP head catches up
MAX_VERIFY_ROWS = 9  # MAX_SPECULATIVE_TOKENS + 1, as in delta_rule.h


class NativeSession:
    """A Session (generate.py). Prefill uses PyTorch's number of threads, a step one."""

    def __init__(
        self,
        library: ctypes.CDLL,
        config: ModelConfig,
        weights: dict[str, torch.Tensor],
        *,
        max_context: int,
        draft_vocabulary: DraftVocabulary | None = None,
        reading: DraftReading = WHOLE_PROMPT,
    ) -> None:
        """weights: checkpoint tensors in fp32, with the `mtp.` ones if drafts are wanted; emptied here.

        draft_vocabulary, reading: as in TorchSession.
        """
        self._weights = NativeWeights(
            config,
            weights,
            max_context=max_context,
            prefill_threads=min(torch.get_num_threads(), MAX_PREFILL_THREADS),
            draft_vocabulary=draft_vocabulary,
        )
        self._library = library
        self.has_mtp = self._weights.has_mtp
        self.reading = reading if self.has_mtp else NOTHING
        self.config = config
        with_halves = bool(library.kernarc_reads_halves())
        self.state = NativeState.empty(config, with_mtp=self.has_mtp, with_halves=with_halves)
        self.context_length = 0
        self.mtp_origin = 0  # the position whose MTP keys and values lie first
        self._capacity = 0  # positions that fit into every cache
        self._prefill_rows: int = library.kernarc_max_rows()
        self._drafts = (ctypes.c_int64 * MAX_VERIFY_ROWS)()
        self._tokens = (ctypes.c_int64 * MAX_VERIFY_ROWS)()
        self._engine = ctypes.c_void_p(library.kernarc_create(ctypes.byref(self._weights.view)))
        if not self._engine:
            raise NativeUnavailableError("there is not enough memory for the decoder's buffers")
        weakref.finalize(self, library.kernarc_destroy, self._engine)

    @property
    def mtp_cache(self) -> NativeKeyValueCache:
        """The MTP layer's keys and values."""
        cache = self.state.layers[-1]
        assert self.has_mtp, "only a session with an MTP head has it"
        assert isinstance(cache, NativeKeyValueCache)
        return cache

    @property
    def mtp_length(self) -> int:
        """The position up to which MTP keys and values are a prompt's or come from true hidden states."""
        return self.context_length - int(self._library.kernarc_backlog_rows(self._engine))

    def last_rows(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the last step: hidden states after the final norm [rows, H], logits [rows, V]."""
        hidden, logits = torch.empty(rows, self.config.hidden_size), torch.empty(rows, self.config.vocab_size)
        self._library.kernarc_last_rows(self._engine, rows, hidden.data_ptr(), logits.data_ptr())
        return hidden, logits

    def prefill(self, prompt_ids: Sequence[int]) -> int:
        """Reset, read the whole prompt, return the first greedy token."""
        if len(prompt_ids) >= self._capacity:
            self._allocate(len(prompt_ids))
        self.mtp_origin = first_position(len(prompt_ids), self.reading.window)
        finished = max(self.mtp_origin, first_position(len(prompt_ids), self.reading.context))
        self._library.kernarc_reset(self._engine, self.mtp_origin)
        ids = array.array("q", prompt_ids)
        address, item_bytes = ids.buffer_info()[0], ids.itemsize
        rows = 0
        for start in range(0, len(ids), self._prefill_rows):
            raise_if_cancelled()
            rows = min(self._prefill_rows, len(ids) - start)
            skipped = min(max(0, finished - start), rows)
            self._read(address + item_bytes * start, rows, start, skipped, min(rows, len(ids) - start - 1))
        self.context_length = len(ids)
        return int(self._library.kernarc_first_token(self._engine, rows - 1))

    def _read(self, ids_address: int, rows: int, start: int, skipped: int, following: int) -> None:
        """One forward of a prefill; `skipped` rows go without the last mixer, `following` have a known next token."""
        self._library.kernarc_prefill(self._engine, ids_address, rows, start, skipped, following)

    def step(self, num_drafts: int) -> tuple[list[int], int]:
        """Draft, verify, commit: (1 … num_drafts + 1 new tokens, how many of them were drafts)."""
        assert 0 <= num_drafts < MAX_VERIFY_ROWS, "the buffers of a verify hold no more rows"
        if self.context_length + num_drafts >= self._capacity:
            self._allocate(self.context_length + num_drafts + 1, keep=self.context_length)
        for place, draft in enumerate(self.draft(num_drafts)):
            self._drafts[place] = draft
        accepted: int = self._library.kernarc_step(self._engine, self._drafts, num_drafts, self._tokens)
        self.context_length += accepted + 1
        return self._tokens[: accepted + 1], accepted

    def draft(self, num_drafts: int) -> list[int]:
        """Guess the tokens after the unread one by recursion of the MTP head."""
        if num_drafts == 0:
            if self.has_mtp and self._library.kernarc_backlog_rows(self._engine) >= _BACKLOG_LIMIT:
                self._library.kernarc_read_backlog(self._engine, 0)
            return []
        assert self.has_mtp, "only a session with an MTP head drafts"
        self._library.kernarc_draft(self._engine, num_drafts, self._drafts)
        return self._drafts[:num_drafts]

    def _allocate(self, length: int, keep: int = 0) -> None:
        """Room for `length` positions and some more in every cache; the C++ is told where the state lies now."""
        for cache in self.state.caches:
            cache.allocate(length, keep)
        for index, layer in enumerate(self.state.layers):
            first, second = layer.pointers()
            capacity = layer.capacity if isinstance(layer, NativeKeyValueCache) else 0
            self._library.kernarc_bind(self._engine, index, first, second, capacity)
        if self.has_mtp and self.mtp_cache.halves is not None:
            keys, values = self.mtp_cache.halves
            self._library.kernarc_bind_halves(self._engine, keys.data_ptr(), values.data_ptr())
        self._capacity = min((cache.capacity for cache in self.state.caches), default=1 << 62)
