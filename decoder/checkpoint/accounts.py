"""What a checkpoint weighs, part by part, and the bytes one decoder step cannot avoid reading and writing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .config import FULL_ATTENTION, ModelConfig
from .layout import TensorSpec, checkpoint_tensors
from .safetensors_files import StoredTensor
from .weights import Checkpoint

STATE_BYTES = 4  # GDN state is fp32
CACHE_BYTES = 2  # keys and values in bf16
MAIN_PARTS = ("attention", "gated delta net", "mlp", "norms")


@dataclass(frozen=True, slots=True)
class PartAccount:
    """One part of a checkpoint; n_bytes with the FP8 scales; dtypes as stored."""

    part: str
    n_tensors: int
    n_parameters: int
    n_bytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepFloor:
    """Bytes of one step that verifies num_drafts + 1 rows after num_drafts drafts, `depth` tokens into a sequence."""

    depth: int
    num_drafts: int
    main_weights: int
    heads: int  # the head once for the verify and once a draft, there only its draft rows
    mtp_weights: int  # layer and fc, once a draft
    gdn_state: int  # read once, written once (lazy commit)
    gdn_state_eager: int  # read once, written after every row
    kv_cache: int  # main layers once, the MTP layer once a draft

    @property
    def total(self) -> int:
        """With lazy commit."""
        return self.main_weights + self.heads + self.mtp_weights + self.gdn_state + self.kv_cache

    @property
    def total_eager(self) -> int:
        """With the state written after every row."""
        return self.total - self.gdn_state + self.gdn_state_eager

    def floor_ms(self, tb_per_s: float) -> float:
        """Milliseconds at a memory bandwidth in TB/s."""
        return self.total / tb_per_s / 1e9


def read_accounts(model_dir: Path) -> tuple[ModelConfig, list[PartAccount]]:
    """Configuration and accounts of a directory, from its headers; every name and shape is checked on the way."""
    config = ModelConfig.from_directory(model_dir)
    stored = Checkpoint(model_dir, config).tensors
    return config, part_accounts(checkpoint_tensors(config), stored)


def part_accounts(specs: Sequence[TensorSpec], stored: dict[str, StoredTensor]) -> list[PartAccount]:
    """One account a part, in file order. stored: canonical name → what the headers say."""
    parts: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        parts.setdefault(spec.part, []).append(spec)
    accounts = []
    for part, members in parts.items():
        names = [name for spec in members for name in (spec.name, spec.scale_name) if name in stored]
        accounts.append(
            PartAccount(
                part=part,
                n_tensors=len(names),
                n_parameters=sum(spec.elements for spec in members),
                n_bytes=sum(stored[name].end - stored[name].start for name in names),
                dtypes=tuple(sorted({stored[name].dtype for name in names})),
            )
        )
    return accounts


def step_floor(
    config: ModelConfig, accounts: Sequence[PartAccount], *, depth: int, num_drafts: int, draft_rows: int | None = None
) -> StepFloor:
    """Source: MODEL section 4's arithmetic. Activations, embedding rows and logits are not counted.

    draft_rows: of the head, which a draft reads; all of them unless given.
    """
    n_bytes = {account.part: account.n_bytes for account in accounts}
    head = n_bytes.get("head", n_bytes["embedding"])  # a tied head is the embedding
    num_attention = sum(kind == FULL_ATTENTION for kind in config.layer_types)
    num_gdn = len(config.layer_types) - num_attention
    state = num_gdn * config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    layer_token = 2 * config.num_key_value_heads * config.head_dim * CACHE_BYTES
    return StepFloor(
        depth=depth,
        num_drafts=num_drafts,
        main_weights=sum(n_bytes.get(part, 0) for part in MAIN_PARTS),
        heads=head + num_drafts * head * min(draft_rows or config.vocab_size, config.vocab_size) // config.vocab_size,
        mtp_weights=(n_bytes.get("mtp layer", 0) + n_bytes.get("mtp fc", 0)) * num_drafts,
        gdn_state=2 * state * STATE_BYTES,
        gdn_state_eager=(num_drafts + 2) * state * STATE_BYTES,
        kv_cache=depth * layer_token * (num_attention + num_drafts),
    )
