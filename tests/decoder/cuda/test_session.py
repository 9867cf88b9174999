"""The whole CUDA session in the interpreter: its ids against the reference, its independence of the draft length."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from kernarc.decoder.checkpoint.config import ModelConfig
from kernarc.decoder.checkpoint.draft_vocabulary import DraftVocabulary
from kernarc.decoder.checkpoint.quantize import quantize_checkpoint
from kernarc.decoder.checkpoint.weights import Checkpoint
from kernarc.decoder.cuda import prefill as cuda_prefill
from kernarc.decoder.cuda.kernels.prefill_fp8 import fits
from kernarc.decoder.cuda.kernels.products import CudaProducts, PlainProducts, Products
from kernarc.decoder.cuda.session import CudaSession, Tuning
from kernarc.decoder.cuda.weights import load_cuda_weights

from ...fakes.decoder_checkpoints import Layout, RandomCheckpoint, write_checkpoint

PROMPT = [(7 * i * i + 3) % 200 for i in range(11)]
SMALLER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
ON_CARD = torch.cuda.is_available()
SHAPE = {
    "vocab_size": 208,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "eos_token_id": 207,
    **({} if ON_CARD else SMALLER),
}
STEPS = 40 if ON_CARD else 3  # the interpreter takes seconds a step
TIE = 0.05  # logits closer than this may swap between fp16 and fp32 activations; they spread over about ±5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> RandomCheckpoint:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "fp8", SHAPE, Layout(fp8=True), seed=3)


@pytest.fixture(scope="module")
def bf16_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> RandomCheckpoint:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "bf16", SHAPE, seed=4)


def session(
    path: Path,
    device: str,
    *,
    piece_rows: int = 64,
    graphs: bool = False,
    max_context: int = 600,
    drafted: list[int] | None = None,
    fused_gdn: bool = True,
    prefill_fp8: bool = False,
    overlap: bool = True,
) -> CudaSession:
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    config = ModelConfig.from_directory(path)
    vocabulary = None if drafted is None else DraftVocabulary(tuple(drafted), "test")
    weights = load_cuda_weights(Checkpoint(path, config), config, where, with_mtp=True, draft_vocabulary=vocabulary)
    products: Products = CudaProducts(weights.linears(), where) if device == "cuda" else PlainProducts()
    tuning = Tuning(
        graphs=graphs, overlap=overlap, fused_gdn=fused_gdn, prefill_dtype=torch.float32, piece_rows=piece_rows
    )
    return CudaSession(
        config, weights, products, max_context=max_context, device=where, prefill_fp8=prefill_fp8, tuning=tuning
    )


def decode(running: CudaSession, drafts: list[int], prompt: list[int] = PROMPT) -> tuple[list[int], list[int]]:
    """(ids, accepted a step) over the given draft counts."""
    ids, accepted = [running.prefill(prompt)], []
    for num_drafts in drafts:
        tokens, count = running.step(num_drafts)
        assert 1 <= len(tokens) <= num_drafts + 1
        assert count == len(tokens) - 1 <= running.drafted
        ids += tokens
        accepted.append(count)
    assert running.context_length == len(prompt) + len(ids) - 1
    return ids, accepted


def worst_gap(model: RandomCheckpoint, prompt: list[int], ids: list[int]) -> float:
    """How far below the reference's top logit the least likely emitted id lies."""
    with torch.inference_mode():
        logits = model.reference()(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return float((logits.max(-1).values - logits.gather(1, torch.tensor(ids)[:, None])[:, 0]).max())


@pytest.mark.parametrize("num_drafts", range(9) if ON_CARD else [3])
def test_ids_are_the_references_and_the_same_for_every_draft_length(
    num_drafts: int, checkpoint: RandomCheckpoint, device: str
) -> None:
    running = session(checkpoint.path, device)
    alone, _ = decode(running, [0] * 2 * STEPS)
    assert worst_gap(checkpoint, PROMPT, alone) < TIE
    ids, _ = decode(running, [num_drafts] * STEPS)
    shared = min(len(ids), len(alone))
    assert ids[:shared] == alone[:shared]


def test_changing_draft_lengths_leave_the_ids_alone(checkpoint: RandomCheckpoint, device: str) -> None:
    running = session(checkpoint.path, device)
    long_stretch = 17 if ON_CARD else 1  # without drafts the MTP head falls behind and has to catch up
    pattern = [0, 3, 1, *[0] * long_stretch, 2]
    if ON_CARD:
        pattern = pattern * 3 + [8, 0, 5, *[0] * 40, 8, 8]
    ids, _ = decode(running, pattern)
    alone, _ = decode(running, [0] * (len(ids) - 1))
    assert ids == alone


@pytest.mark.parametrize("steps", [7, 8, 9, 17])
def test_a_head_that_fell_behind_catches_up_to_the_bit(steps: int, checkpoint: RandomCheckpoint, device: str) -> None:
    """Its keys after steps without drafts are those of a head that read every position as it came."""
    # without steps that run ahead: such a one has as many drafts as the step before it
    behind, along = (session(checkpoint.path, device, overlap=False) for _ in range(2))
    ids, _ = decode(behind, [*[0] * steps, 1])
    read = len(PROMPT) + steps  # positions whose next token was known before the last step
    others, _ = decode(along, [1] * (steps + 1))
    shared = min(len(ids), len(others))
    assert ids[:shared] == others[:shared]
    keys = [running._state.mtp.keys[:, :read] for running in (behind, along) if running._state.mtp is not None]
    assert keys[0].isfinite().all()
    assert torch.equal(*keys)


def test_a_reduced_draft_vocabulary_leaves_the_ids_alone(checkpoint: RandomCheckpoint, device: str) -> None:
    whole, _ = decode(session(checkpoint.path, device), [2] * STEPS)
    running = session(checkpoint.path, device, drafted=list(range(0, 207, 2)))
    ids, _ = decode(running, [2] * STEPS)
    shared = min(len(ids), len(whole))
    assert ids[:shared] == whole[:shared]
    assert running.weights.draft_head.n == 112  # 104 even ids, filled up to whole units of 16 rows


@pytest.mark.parametrize("fused_gdn", [True, False], ids=["one delta net kernel", "three"])
def test_bf16_weights_and_small_prefill_pieces(fused_gdn: bool, bf16_checkpoint: RandomCheckpoint, device: str) -> None:
    running = session(bf16_checkpoint.path, device, piece_rows=4, fused_gdn=fused_gdn)
    ids, _ = decode(running, [3] * STEPS)
    assert worst_gap(bf16_checkpoint, PROMPT, ids) < TIE


NEEDS_WARP_GROUPS = pytest.mark.skipif(
    ON_CARD and torch.cuda.get_device_capability() != (9, 0), reason="the fused kernel is for sm_90"
)


@pytest.mark.skipif(ON_CARD and torch.cuda.get_device_capability() < (9, 0), reason="no FP8 products on this card")
@pytest.mark.parametrize("one_swiglu", [False, pytest.param(True, marks=NEEDS_WARP_GROUPS)], ids=["apart", "fused"])
def test_prefill_in_fp8_is_near_prefill_in_fp32(
    tmp_path: Path, device: str, one_swiglu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every product and every kernel in front of one in FP8: activations keep three bits of mantissa behind the one."""
    wide = {"hidden_size": 512, "intermediate_size": 512, "head_dim": 128}
    heads = {"num_attention_heads": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    dims = {"linear_value_head_dim": 128, "linear_key_head_dim": 64}
    model = write_checkpoint(tmp_path / "model", SHAPE | wide | heads | dims, Layout(fp8=True), seed=5)
    fused = Mock(side_effect=cuda_prefill.fp8_mlp_inner)
    monkeypatch.setattr(cuda_prefill, "fp8_mlp_inner", fused)
    hidden = []
    for prefill_fp8 in (False, True):
        running = session(model.path, device, piece_rows=7, prefill_fp8=prefill_fp8)
        assert all(map(fits, running.weights.layers[0].linears()))
        short = running._prefill.run(PROMPT).float()
        running._prefill.fp8_rows = 1
        running._prefill._one_swiglu = one_swiglu
        running._state.reset()
        hidden.append(running._prefill.run(PROMPT).float())
    pieces = -(-len(PROMPT) // 7)
    assert fused.call_count == (pieces * running.config.num_hidden_layers if one_swiglu else 0)
    assert torch.equal(short, hidden[0])  # so few rows are not worth it
    error = float((hidden[1] - hidden[0]).norm() / hidden[0].norm())
    assert 1e-3 < error < (0.15 if ON_CARD else 0.3)  # the interpreter loses the carry of a mantissa that rounds up


def test_quantised_on_load_is_the_quantised_checkpoint(
    bf16_checkpoint: RandomCheckpoint, device: str, tmp_path: Path
) -> None:
    quantize_checkpoint(bf16_checkpoint.path, tmp_path / "fp8")
    config = ModelConfig.from_directory(bf16_checkpoint.path)
    loaded = [
        load_cuda_weights(Checkpoint(path, config), config, torch.device(device), with_mtp=True, quantize=quantize)
        for path, quantize in ((bf16_checkpoint.path, True), (tmp_path / "fp8", False))
    ]
    for now, stored in zip(*(weights.linears() for weights in loaded), strict=True):
        assert now.is_fp8 == stored.is_fp8
        assert torch.equal(now.weights, stored.weights)
        if now.scales is not None and stored.scales is not None:
            assert torch.equal(now.scales, stored.scales)
    assert sum(linear.is_fp8 for linear in loaded[0].linears()) > 8


@pytest.mark.parametrize("length", [1, 2, 3] if ON_CARD else [1])
def test_prompts_shorter_than_the_convolution(length: int, checkpoint: RandomCheckpoint, device: str) -> None:
    ids, _ = decode(session(checkpoint.path, device), [2] * STEPS, PROMPT[:length])
    assert worst_gap(checkpoint, PROMPT[:length], ids) < TIE


@pytest.mark.gpu
@pytest.mark.parametrize("num_drafts", range(9))
def test_graphs_change_nothing(num_drafts: int, checkpoint: RandomCheckpoint) -> None:
    if not ON_CARD:
        pytest.skip("no GPU")
    eager = decode(session(checkpoint.path, "cuda"), [num_drafts] * STEPS)
    assert decode(session(checkpoint.path, "cuda", graphs=True), [num_drafts] * STEPS) == eager
