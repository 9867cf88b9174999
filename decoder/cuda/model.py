"""One speculative step as a straight line of kernels: draft, verify, accept. Nothing reads the device or allocates."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..checkpoint.config import ModelConfig
from .kernels.accept import accept
from .kernels.embed import embed_rows, mtp_input
from .kernels.gdn import gdn_step
from .kernels.gdn_prepare import GdnCache, gdn_prepare
from .kernels.gdn_verify import gate_output, gdn_recur
from .kernels.launch import LENGTH, MTP_LENGTH, Launch
from .kernels.linear import Norm
from .kernels.norm import rms_norm
from .kernels.products import Products
from .kernels.rope_qk import rope_qk
from .kernels.screened_head import screened_argmax
from .kernels.verify_attention import verify_attention
from .state import AttentionCache, Scratch, SequenceState
from .weights import AttentionMixer, CudaWeights, GdnMixer, LayerWeights


@dataclass(frozen=True, slots=True)
class Place:
    """Where the rows of a pass stand: positions[slot] + offset + r."""

    slot: int = LENGTH.value
    offset: int = 0


class StepModel:
    """The kernels of a step over fixed weights, state and scratch."""

    def __init__(
        self,
        config: ModelConfig,
        weights: CudaWeights,
        state: SequenceState,
        scratch: Scratch,
        products: Products,
        *,
        pdl: bool = False,
        fused_gdn: bool = False,
        gates_early: bool = True,
    ) -> None:
        """pdl: programmatic dependent launch (sm_90).

        fused_gdn: a Gated DeltaNet layer in one kernel (gdn.cu) instead of three. gates_early: and its gates while the
        projection in front still runs.
        """
        self.config = config
        self.weights = weights
        self.state = state
        self.scratch = scratch
        self.products = products
        self._plain = Launch(pdl)
        self._pdl = pdl
        self._fused_gdn = fused_gdn
        self._gates_early = fused_gdn and gates_early

    def step(self, num_drafts: int) -> None:
        """Draft `num_drafts` tokens, verify them with the pending token, accept; the outcome is in scratch.result."""
        if num_drafts:
            self.draft(num_drafts)
        self.verify(num_drafts)
        accept(
            self.scratch.targets,
            self.state.tokens,
            self.state.positions,
            self.scratch.result,
            num_drafts=num_drafts,
            launch=self._plain,
        )

    def draft(self, num_drafts: int) -> None:
        """Read the accepted positions with their true hidden states, then recurse on the head's own output."""
        scratch, mtp = self.scratch, self.weights.mtp
        assert mtp is not None, "only a session with an MTP head drafts"
        self.read_pending(num_drafts + 1)
        rms_norm(
            scratch.residual(num_drafts + 1, mtp.norm).stream,
            mtp.norm,
            self.config.rms_norm_eps,
            scratch.draft_hidden,
            positions=self.state.positions,
            last_pending=True,
            launch=self._plain,
        )
        self.products.argmax(scratch.draft_hidden, self.weights.draft_head, scratch.drafts[:1])
        for index in range(1, num_drafts):
            self._mtp_pass(1, Place(LENGTH.value, index - 1), draft_index=index)
            rms_norm(
                scratch.residual(1, mtp.norm).stream,
                mtp.norm,
                self.config.rms_norm_eps,
                scratch.draft_hidden,
                launch=self._plain,
            )
            self.products.argmax(scratch.draft_hidden, self.weights.draft_head, scratch.drafts[index : index + 1])

    def read_pending(self, rows: int) -> None:
        """The MTP head over positions MTP_LENGTH … MTP_LENGTH + rows − 1, of which those below LENGTH are true."""
        self._mtp_pass(rows, Place(MTP_LENGTH.value), draft_index=0)

    def verify(self, num_drafts: int) -> None:
        """The target model over the pending token and the drafts; its own choice after each row in scratch.targets."""
        rows = num_drafts + 1
        scratch, state, weights = self.scratch, self.state, self.weights
        residual = scratch.residual(rows, weights.layers[0].in_norm)
        last = scratch.drafts[num_drafts - 1 : num_drafts] if num_drafts else None
        embed_rows(
            state.tokens, state.positions, weights.embedding, residual, last_draft=last,
            draft_ids=weights.draft_ids, launch=self._plain,
        )  # fmt: skip
        next_norms = [*(layer.in_norm for layer in weights.layers[1:]), weights.norm]
        for layer, cache, next_norm in zip(weights.layers, state.layers, next_norms, strict=True):
            self._layer(layer, cache, rows, Place(), next_norm)
        hidden = scratch.hidden(rows)
        rms_norm(
            residual.stream,
            weights.norm,
            self.config.rms_norm_eps,
            hidden,
            ring=state.hidden,
            positions=state.positions,
            launch=self._plain,
        )
        self.choose(hidden, scratch.targets[:rows])

    def choose(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """hidden [R, D] after the final norm → out int64 [R], the target's greedy tokens."""
        screened_argmax(hidden, self.weights.head, self.scratch.head, self.products, out, self._plain)

    def _mtp_pass(self, rows: int, place: Place, *, draft_index: int) -> None:
        scratch, state, mtp = self.scratch, self.state, self.weights.mtp
        assert mtp is not None, "only a session with an MTP head drafts"
        assert state.mtp is not None
        residual = scratch.residual(rows, mtp.layer.in_norm)
        pair = scratch.pair(rows)
        mtp_input(
            state.tokens,
            state.positions,
            self.weights.embedding,
            scratch.draft_hidden if draft_index else state.hidden,
            mtp.norm_embedding,
            mtp.norm_hidden,
            self.config.rms_norm_eps,
            pair,
            residual.stream,
            draft=scratch.drafts[draft_index - 1 : draft_index] if draft_index else None,
            draft_ids=self.weights.draft_ids,
            draft_index=draft_index,
            launch=self._plain,
        )
        self.products.add(pair, mtp.fc, residual)
        self._layer(mtp.layer, state.mtp, rows, place, mtp.norm)

    def _layer(
        self, layer: LayerWeights, cache: GdnCache | AttentionCache, rows: int, place: Place, next_norm: torch.Tensor
    ) -> None:
        scratch, eps = self.scratch, self.config.rms_norm_eps
        if isinstance(layer.mixer, GdnMixer):
            assert isinstance(cache, GdnCache)
            mixed = self._gated_delta_net(layer.mixer, cache, layer, rows)
        else:
            assert isinstance(cache, AttentionCache)
            mixed = self._attention(layer.mixer, cache, layer, rows, place)
        residual = scratch.residual(rows, layer.mlp_norm)
        self.products.add(mixed, layer.mixer.out, residual)
        inner = scratch.inner(rows)
        self.products.swiglu(residual.x, layer.gate_up, inner, Norm(residual.sumsq, eps))
        self.products.add(inner, layer.down, scratch.residual(rows, next_norm))

    def _gated_delta_net(self, mixer: GdnMixer, cache: GdnCache, layer: LayerWeights, rows: int) -> torch.Tensor:
        scratch, eps = self.scratch, self.config.rms_norm_eps
        residual = scratch.residual(rows, layer.in_norm)
        projected = scratch.projected(rows, scratch.qkvz_width)
        mixed = scratch.mixed(rows, attention=False)
        norm = Norm(residual.sumsq, eps)
        self.products.store(residual.x, mixer.qkvz, projected, norm, next_reads_x=self._gates_early)
        if self._fused_gdn:
            positions, x, sumsq = self.state.positions, residual.x, residual.sumsq
            gdn_step(
                projected, x, sumsq, mixer.small, cache, eps, positions, mixed, overlap=self._pdl,
                x_is_here=self._gates_early,
            )  # fmt: skip
            return mixed
        gdn_prepare(
            projected,
            residual.x,
            residual.sumsq,
            mixer.small,
            cache,
            scratch.gdn_query,
            eps,
            self.state.positions,
            launch=self._plain,
        )
        o = scratch.gdn_output[:rows]
        gdn_recur(scratch.gdn_query, cache, self.state.positions, o, launch=self._plain)
        z = projected[:, self.config.conv_dim :]
        gate_output(o, z, mixer.small.norm, eps, mixed, launch=self._plain)
        return mixed

    def _attention(
        self, mixer: AttentionMixer, cache: AttentionCache, layer: LayerWeights, rows: int, place: Place
    ) -> torch.Tensor:
        scratch, eps, positions = self.scratch, self.config.rms_norm_eps, self.state.positions
        residual = scratch.residual(rows, layer.in_norm)
        projected, query = scratch.projected(rows, scratch.qkv_width), scratch.query(rows)
        self.products.store(residual.x, mixer.qkv, projected, Norm(residual.sumsq, eps))
        rope_qk(
            projected,
            mixer.norm_q,
            mixer.norm_k,
            eps,
            self.state.rope,
            positions,
            query,
            cache.keys,
            cache.values,
            slot=place.slot,
            offset=place.offset,
            launch=self._plain,
        )
        mixed = scratch.mixed(rows, attention=True)
        verify_attention(
            query,
            cache.keys,
            cache.values,
            positions,
            projected,
            scratch.partial,
            scratch.top,
            scratch.total,
            mixed,
            segments=scratch.segments,
            slot=place.slot,
            offset=place.offset,
            launch=self._plain,
        )
        return mixed
