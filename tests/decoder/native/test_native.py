"""The C++ against its twin: the same logits up to fp32, and the same bits whatever rows ride along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kernarc.decoder.generate import Decoder
from kernarc.decoder.native import build, library, state, weights
from kernarc.decoder.native.layout import interleave, pack
from kernarc.decoder.native.library import load_library, open_library
from kernarc.decoder.native.session import MAX_VERIFY_ROWS, NativeSession
from kernarc.decoder.native.state import NativeDeltaState
from kernarc.decoder.session import MAX_SPECULATIVE_TOKENS
from safetensors.torch import save_file

from ...fakes.decoder_checkpoints import RandomCheckpoint, write_checkpoint
from ...fakes.draft_oracle import force_accepts, greedy_ids, native_session, prompt, torch_session
from ..conftest import require_compiler
from ..cpu.test_state import assert_near


@pytest.fixture(autouse=True)
def _compiled() -> None:
    require_compiler()


def load(checkpoint: RandomCheckpoint, **options: Any) -> Decoder:
    return Decoder.load(checkpoint.path, device="cpu", native=True, **options)


def held_bits(session: NativeSession) -> list[torch.Tensor]:
    """Everything committed of the target, as it lies in memory."""
    held = []
    for layer in session.state.layers[: session.config.num_hidden_layers]:
        if isinstance(layer, NativeDeltaState):
            held += [layer.recurrent.clone(), layer.window.clone()]
        else:
            held += [layer.keys[:, : session.context_length], layer.values[:, : session.context_length].clone()]
    return held


@pytest.mark.parametrize("length", [3, 61, 130])
def test_hidden_states_logits_and_state_have_the_same_bits_for_every_draft_length(
    checkpoint: RandomCheckpoint, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp#23302: k + 1 rows a step, read one by one or nine at a time; 61 + 9 crosses a block of 64 keys."""
    decoder = load(checkpoint)
    session, prompt_ids = native_session(decoder), prompt(length)
    ids = greedy_ids(decoder, prompt_ids, 60)
    runs = []
    for num_drafts in range(9):
        with monkeypatch.context() as patch:
            force_accepts(patch, decoder, ids, length, [])
            session.prefill(prompt_ids)
            hidden, logits = [], []
            while sum(map(len, hidden)) < 18:
                session.step(min(num_drafts, 17 - sum(map(len, hidden))))
                rows = session.context_length - length - sum(map(len, hidden))
                for kept, new in zip((hidden, logits), session.last_rows(rows), strict=True):
                    kept.append(new)
        runs.append([torch.cat(hidden), torch.cat(logits), *held_bits(session)])
    for num_drafts, run in enumerate(runs[1:], 1):
        for one, other in zip(runs[0], run, strict=True):
            assert torch.equal(one, other), num_drafts


def test_rejected_rows_leave_no_bit_behind(base_checkpoint: RandomCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens one at a time, and with eight drafts of which 0 … 8 are right."""
    decoder = load(base_checkpoint)
    session, prompt_ids = native_session(decoder), prompt(60)
    ids = greedy_ids(decoder, prompt_ids, 120)
    held = []
    for num_drafts, accepts in ((0, [0] * 29), (8, [0, 8, 3, 0, 5, 1, 5])):
        with monkeypatch.context() as patch:
            force_accepts(patch, decoder, ids, len(prompt_ids), accepts)
            session.prefill(prompt_ids)
            for accepted in accepts:
                assert session.step(num_drafts)[1] == accepted
        assert session.context_length == 60 + sum(accepts) + len(accepts)
        held.append(held_bits(session))
    for one, other in zip(*held, strict=True):
        assert torch.equal(one, other)


def test_hidden_states_and_logits_equal_transformers(
    checkpoint: RandomCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row by row in verifies of every width after a prefill."""
    decoder = load(checkpoint)
    session, prompt_ids = native_session(decoder), prompt(100)
    ids = greedy_ids(decoder, prompt_ids, 60)
    force_accepts(monkeypatch, decoder, ids, 100, [])
    session.prefill(prompt_ids)
    parts = []
    for num_drafts in range(9):
        session.step(num_drafts)
        parts.append(session.last_rows(num_drafts + 1))
    hidden, logits = (torch.cat(part) for part in zip(*parts, strict=True))
    reference: Any = checkpoint.reference()
    read = torch.tensor([prompt_ids + ids[:45]])
    with torch.inference_mode():
        assert_near(hidden, reference.model(read, use_cache=False).last_hidden_state[0, 100:])
        assert_near(logits, reference(read, use_cache=False).logits[0, 100:])


def test_weights_that_are_no_bf16_stay_fp32(tmp_path: Path) -> None:
    """An fp32 checkpoint: nothing is rounded on the way in."""
    checkpoint = write_checkpoint(tmp_path / "model")
    noisy = {name: weight + 1e-4 * torch.randn_like(weight) for name, weight in checkpoint.weights.items()}
    save_file(noisy, checkpoint.path / "model.safetensors")
    decoder = load(checkpoint)
    native_session(decoder).prefill(prompt(50))
    native_session(decoder).step(0)
    plain = torch_session(Decoder.load(checkpoint.path, native=False))
    plain.prefill(prompt(50))
    with torch.inference_mode():
        expected = plain.model.forward(torch.tensor([plain._last_token]), plain.state, 50)
    assert_near(native_session(decoder).last_rows(1)[0], expected)


def test_what_drafts_read_is_the_cache_in_sixteen_bits(
    checkpoint: RandomCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after the caches have grown."""
    monkeypatch.setattr(state, "SPARE", 3)
    session = native_session(load(checkpoint))
    cache = session.mtp_cache
    if not load_library().kernarc_reads_halves():
        pytest.skip("no instructions for halves on this processor: drafts read fp32")
    session.prefill(prompt(61))
    while session.context_length < 140:
        session.step(3)
    length = session.mtp_length
    assert cache.halves is not None
    half_keys = cache.halves[0].transpose(2, 3).flatten(1, 2)[:, :length]
    assert torch.equal(half_keys, cache.keys[:, :length].half())
    assert torch.equal(cache.halves[1][:, :length, : cache.dim], cache.values[:, :length].half())


def test_values_too_large_for_halves_change_no_output(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model")
    large = {**checkpoint.weights}
    large["mtp.layers.0.self_attn.v_proj.weight"] = 1e6 * large["mtp.layers.0.self_attn.v_proj.weight"]
    save_file(large, checkpoint.path / "model.safetensors")
    decoder = load(checkpoint)
    ids = greedy_ids(decoder, prompt(40), 40)
    steps = list(decoder.generate(prompt(40), max_tokens=40, ignore_eos=True))
    assert [token for step in steps for token in step.token_ids] == ids
    if (halves := native_session(decoder).mtp_cache.halves) is not None:
        assert halves[1][:, :40, :16].abs().max() == 65504


def test_more_drafts_than_buffers_are_refused(base_checkpoint: RandomCheckpoint) -> None:
    session = native_session(load(base_checkpoint))
    session.prefill(prompt(5))
    with pytest.raises(AssertionError, match="hold no more rows"):
        session.step(MAX_SPECULATIVE_TOKENS + 1)
    assert MAX_VERIFY_ROWS == MAX_SPECULATIVE_TOKENS + 1


def test_wide_convolutions_and_lone_layers(tmp_path: Path) -> None:
    """A kernel of 20, a model of one GDN layer alone, one of one attention layer: nothing takes a size for granted."""
    for name, changes in {
        "wide": {"linear_conv_kernel_dim": 20},
        "narrow": {"linear_conv_kernel_dim": 1},
        "gdn": {"num_hidden_layers": 1, "layer_types": ["linear_attention"], "mtp_num_hidden_layers": 0},
        "attention": {"num_hidden_layers": 1, "layer_types": ["full_attention"], "tie_word_embeddings": True},
    }.items():
        checkpoint = write_checkpoint(tmp_path / name, changes)
        drafts = 3 * checkpoint.config["mtp_num_hidden_layers"]
        decoder = load(checkpoint, num_speculative_tokens=drafts)
        plain = Decoder.load(checkpoint.path, native=False, num_speculative_tokens=drafts)
        for length in (1, 33, 100):
            ids = greedy_ids(plain, prompt(length), 30)
            assert greedy_ids(decoder, prompt(length), 30, drafts) == ids, (name, length)


@pytest.mark.parametrize("march", ["-march=x86-64", "-march=x86-64-v3"])
def test_without_avx512_the_output_is_the_same(
    base_checkpoint: RandomCheckpoint, march: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The portable half of simd.h: SSE2 without fused multiply-add, and AVX2 with it."""
    if "flags" not in Path("/proc/cpuinfo").read_text() or (
        "v3" in march and not {"avx2", "fma"} <= set(Path("/proc/cpuinfo").read_text().split())
    ):
        pytest.skip(f"this processor cannot run {march}")
    plain = Decoder.load(base_checkpoint.path, native=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", tuple(march if flag == "-march=native" else flag for flag in build.FLAGS))
    portable = open_library(build.library_path())
    monkeypatch.setattr(library, "load_library", lambda: portable)
    decoder = load(base_checkpoint)
    for length in (1, 130):
        ids = greedy_ids(plain, prompt(length), 40)
        for num_drafts in (0, 3, 8):
            assert greedy_ids(decoder, prompt(length), 40, num_drafts) == ids


def native_values(name: str, x: torch.Tensor) -> torch.Tensor:
    got = torch.empty_like(x)
    getattr(load_library(), f"kernarc_{name}")(x.data_ptr(), got.data_ptr(), len(x))
    return got


@pytest.mark.parametrize(
    ("name", "low", "high", "exact", "ulps"),
    [
        ("exp", -87.3, 88.7, torch.exp, 1.5),
        ("exp2", -126.0, 0.0, torch.exp2, 1.5),
        ("softplus", -80.0, 60.0, lambda x: x.exp().log1p(), 3.0),
    ],
)
def test_functions_are_right_to_about_an_ulp(name: str, low: float, high: float, exact: Any, ulps: float) -> None:
    x = torch.cat([torch.linspace(low, high, 2_000_003), torch.linspace(-1, min(1, high), 100_000)])
    expected = exact(x.double())
    ulp = torch.nextafter(expected.float(), torch.tensor(float("inf"))).double() - expected.float().double()
    assert ((native_values(name, x).double() - expected) / ulp).abs().max() < ulps


def test_functions_at_the_ends() -> None:
    infinity = float("inf")
    x = torch.tensor([-infinity, -200.0, -170.0, 0.0, float("nan")])
    for name in ("exp", "exp2"):
        got = native_values(name, x)
        assert got[:4].tolist() == [0.0, 0.0, 0.0, 1.0]
        assert got[4].isnan()
    assert native_values("exp", torch.tensor([89.0, infinity])).tolist() == [infinity, infinity]
    assert native_values("softplus", torch.tensor([-infinity, 1e30, infinity])).tolist() == [
        0.0,
        torch.tensor(1e30).item(),
        infinity,
    ]


def test_tables_by_token_change_no_bit(checkpoint: RandomCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a large vocabulary gets: the embedding's products at every step."""
    held = []
    for table_floats in (weights.TABLE_FLOATS, 0):
        monkeypatch.setattr(weights, "TABLE_FLOATS", table_floats)
        session = native_session(load(checkpoint))
        session.prefill(prompt(70))
        drafts = [tuple(session.step(3)[0]) for _ in range(12)]
        held.append((drafts, held_bits(session), session.mtp_cache.keys[:, : session.mtp_length]))
    assert held[0][0] == held[1][0]
    for one, other in zip([*held[0][1], held[0][2]], [*held[1][1], held[1][2]], strict=True):
        assert torch.equal(one, other)


def test_packed_layout() -> None:
    """Output o, input k of a matrix: group o // 64, then k, then o % 64; two k side by side in bf16."""
    weight = (torch.arange(70 * 6).view(70, 6) % 251).float()
    packed, is_bf16 = pack(weight)
    assert is_bf16
    assert packed.dtype == torch.bfloat16
    assert packed.numel() == 80 * 6  # outputs rounded up to 16
    for output, k in ((0, 0), (63, 5), (64, 0), (69, 4)):
        width, start = (64, 0) if output < 64 else (16, 64 * 6)
        place = start + ((k // 2) * width + output % 64) * 2 + k % 2
        assert packed[place] == weight[output, k]
    packed, is_bf16 = pack(weight + 1e-3)
    assert not is_bf16
    assert packed[64 * 2 + 7] == weight[7, 2] + 1e-3
    odd, is_bf16 = pack(weight[:, :5])
    assert not is_bf16, "bf16 pairs need an even number of inputs"
    assert odd.numel() == 80 * 5


def test_interleaved_gate_and_up() -> None:
    gate, up = torch.randn(40, 3), torch.randn(40, 3)
    both = interleave(gate, up).view(2, 2, 32, 3)
    assert torch.equal(both[:, 0].reshape(-1, 3)[:40], gate)
    assert torch.equal(both[:, 1].reshape(-1, 3)[:40], up)
    assert not both[1, :, 8:].any()
