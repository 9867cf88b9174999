"""One sequence on one GPU: prefill, then a graph a step, the next step running while the host streams this one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from ..checkpoint.config import ModelConfig
from ..checkpoint.draft_vocabulary import DraftVocabulary
from ..checkpoint.weights import Checkpoint
from ..errors import RequestError
from .graphs import StepGraphs
from .kernels.gdn import gdn_step_fits
from .kernels.products import CudaProducts, Products
from .limits import check_card, check_drafts, check_memory, check_shapes, most_drafts
from .model import StepModel
from .prefill import PIECE_ROWS, Prefill
from .state import Scratch, SequenceState
from .weights import CudaWeights, load_cuda_weights

CATCH_UP_ROWS = 8  # that the MTP head reads at a time; 16 rows of the 27B's widest product fit no SM
WARM_UP_LENGTHS = (32768 + 5, 16384 + 5, 8192 + 5, 5, 1)  # a whole piece and an odd rest behind it


def warm_up_length(max_context: int) -> int:
    """The longest of them that the window holds."""
    return next(length for length in WARM_UP_LENGTHS if length < max_context)


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a session runs what it computes. Production takes the defaults; benches and tests compare the other forms.

    graphs: replay captured steps. overlap: start the next step before the host has streamed this one.
    pdl: let a kernel start while its predecessor ends (sm_90).
    fused_gdn: a Gated DeltaNet layer in one kernel where it runs (sm_90, its head dimensions); else in three.
    gates_early: see StepModel. prefill_dtype, piece_rows: see Prefill.
    """

    graphs: bool = True
    overlap: bool = True
    pdl: bool = True
    fused_gdn: bool = True
    gates_early: bool = True
    prefill_dtype: torch.dtype = torch.bfloat16
    piece_rows: int = PIECE_ROWS


PRODUCTION = Tuning()


class CudaSession:
    """A Session (generate.py) on a CUDA card. On a CPU it runs the same kernels in Triton's interpreter, for tests."""

    def __init__(
        self,
        config: ModelConfig,
        weights: CudaWeights,
        products: Products,
        *,
        max_context: int,
        device: torch.device,
        prefill_fp8: bool = False,
        tuning: Tuning = PRODUCTION,
    ) -> None:
        """prefill_fp8: see prefill_fp8.py."""
        self.config = config
        self.max_context = max_context
        self.context_length = 0
        self._device = device
        self._state = SequenceState(config, max_context, device)
        self._scratch = Scratch(config, device)
        pdl = tuning.pdl and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        fits = gdn_step_fits(config.linear_key_head_dim, config.linear_value_head_dim, device)
        self._model = StepModel(
            config, weights, self._state, self._scratch, products, pdl=pdl,
            fused_gdn=tuning.fused_gdn and fits, gates_early=tuning.gates_early,
        )  # fmt: skip
        self._graphs = StepGraphs(self._model.step, self._scratch.result, self._state, enabled=tuning.graphs)
        self._prefill = Prefill(
            config, weights, self._state, dtype=tuning.prefill_dtype, piece_rows=tuning.piece_rows, fp8=prefill_fp8
        )
        self._products = products
        self.weights = weights
        self._overlap = tuning.overlap and device.type == "cuda"
        self._has_mtp = weights.mtp is not None
        self.max_drafts = most_drafts(config, device) if self._has_mtp else 0
        self._mtp_length = 0  # as the device will have it once the step in flight has ended
        self._in_flight: int | None = None  # drafts of the step that runs ahead
        self._ready: list[int] = []  # tokens of a step that ran ahead with more drafts than then asked for
        self.drafted = 0  # drafts verified by the step that gave the last tokens

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        config: ModelConfig,
        *,
        max_context: int,
        num_speculative_tokens: int = 3,
        device: str = "cuda",
        draft_vocabulary: DraftVocabulary | None = None,
        prefill_fp8: bool = False,
        quantize: bool = False,
        as_many_as_fit: bool = False,
    ) -> Self:
        """Check card, shapes and memory, then stream the weights and capture the steps that will be used.

        as_many_as_fit: fewer drafts where the card does not hold a step of num_speculative_tokens.
        prefill_fp8: see prefill_fp8.py. quantize: see load_cuda_weights.
        Raises DecoderError before anything is loaded when the card or its memory will not do.
        """
        where = torch.device(device, torch.cuda.current_device() if torch.cuda.is_available() else 0)
        check_card(where)
        check_shapes(config)
        if as_many_as_fit:
            num_speculative_tokens = min(num_speculative_tokens, max(0, most_drafts(config, where)))
        check_drafts(num_speculative_tokens, config, where)
        check_memory(
            checkpoint,
            config,
            max_context,
            where,
            with_mtp=num_speculative_tokens > 0,
            draft_rows=0 if draft_vocabulary is None else len(draft_vocabulary.ids),
            quantize=quantize,
        )
        with torch.inference_mode():
            weights = load_cuda_weights(
                checkpoint,
                config,
                where,
                with_mtp=num_speculative_tokens > 0,
                draft_vocabulary=draft_vocabulary,
                quantize=quantize,
            )
            products = CudaProducts(weights.linears(), where)
            session = cls(config, weights, products, max_context=max_context, device=where, prefill_fp8=prefill_fp8)
            session.warm_up(num_speculative_tokens)
        return session

    @torch.inference_mode()
    def warm_up(self, num_drafts: int) -> None:
        """Compile and run everything once and capture the step of `num_drafts`, so that no request pays for it."""
        self.prefill([0] * warm_up_length(self.max_context))
        self._prefill.plan_attention()
        self.capture(num_drafts)
        self._state.reset()

    @torch.inference_mode()
    def capture(self, num_drafts: int) -> None:
        """Compile and capture the step of `num_drafts`, which then has run RUNS_A_CAPTURE times."""
        self._graphs.capture(num_drafts)

    @torch.inference_mode()
    def prefill(self, prompt_ids: Sequence[int]) -> int:
        """Reset, read the whole prompt, return the first greedy token."""
        self._drop_in_flight()
        self._state.reset()
        hidden = self._prefill.run(prompt_ids)
        first = self._scratch.targets[:1]
        self._model.choose(hidden, first)
        token = int(first)
        self._state.tokens[len(prompt_ids) % len(self._state.tokens)] = token
        self.context_length = len(prompt_ids)
        self._mtp_length = len(prompt_ids) - 1
        return token

    @torch.inference_mode()
    def step(self, num_drafts: int) -> tuple[list[int], int]:
        """Draft, verify, commit: (1 … num_drafts + 1 new tokens, how many of them were drafts)."""
        if not 0 <= num_drafts <= self.max_drafts:
            raise RequestError(
                f"a step of {num_drafts} drafts", f"0 … {self.max_drafts} are possible, only 0 without an MTP head"
            )
        is_new = not self._ready
        if is_new:
            self._ready = self._next_tokens(num_drafts)
        tokens, self._ready = self._ready[: num_drafts + 1], self._ready[num_drafts + 1 :]
        if not is_new or self._ready:  # a part of a step: as far as it goes, every draft was right
            self.drafted = len(tokens) - 1
        self.context_length += len(tokens)
        return tokens, len(tokens) - 1  # the last one is the target's own

    def _next_tokens(self, num_drafts: int) -> list[int]:
        """The tokens of the step in flight, or of a new one; then start the one after."""
        if self._in_flight is None:
            self._launch(num_drafts, self.context_length)
        assert self._in_flight is not None
        ran = self.drafted = self._in_flight
        self._in_flight = None
        tokens, _ = self._graphs.read(ran)
        committed = self.context_length + len(tokens)
        if ran:
            self._mtp_length = self.context_length
        if self._overlap and ran == num_drafts and committed + num_drafts + 1 <= self.max_context:
            self._launch(num_drafts, committed)
        return tokens

    def _launch(self, num_drafts: int, length: int) -> None:
        """Start a step at `length` committed tokens. The MTP head catches up first where it has fallen behind."""
        rows = min(CATCH_UP_ROWS, self.max_drafts + 1)
        most = num_drafts + 1 if num_drafts else rows  # what the step itself can read
        while self._has_mtp and length - self._mtp_length > most:
            self._model.read_pending(rows)
            # The newest position may be read again: its output makes the first draft.
            self._mtp_length = min(self._mtp_length + rows, length - 1)
            self._state.positions[2:3].fill_(self._mtp_length)
        self._graphs.launch(num_drafts)
        self._in_flight = num_drafts

    def _drop_in_flight(self) -> None:
        if self._in_flight is not None:
            self._graphs.read(self._in_flight)
        self._in_flight, self._ready = None, []
