"""Compiles every Triton kernel at the 27B shapes for one architecture, without a GPU.

test_compile.py runs this file as a program of its own, `compile_kernels.py 90`: Triton must not be interpreting. It
writes a line a kernel and group, which ends in "ok" unless the kernel wants more shared memory than the card has or
holds an fp8 type on sm_80.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from kernarc.decoder.cuda.kernels import (
    accept,
    embed,
    gdn_prefill,
    gdn_prepare,
    gdn_verify,
    norm,
    prefill,
    prefill_fp8,
    prompt_rope,
    rope_qk,
    screened_head,
    verify_attention,
)
from kernarc.decoder.cuda.kernels.launch import Launch
from kernarc.decoder.cuda.kernels.linear import Residual
from kernarc.decoder.cuda.kernels.nvrtc import SHARED_LIMIT_BYTES
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

ROW_COUNTS = (1, 4, 9, 16)
_OPTIONS = ("num_warps", "num_stages", "launch_pdl", "num_ctas")
_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel launch as it would have been made."""

    kernel: JITFunction[Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def compile(self, arch: int) -> Any:
        """The compiled kernel for sm_{arch}, specialised as the launcher would: pointers and sizes divisible by 16."""
        names = self.kernel.arg_names
        values = {**dict(zip(names, self.args, strict=False)), **self.kwargs}
        options = {name: values.pop(name) for name in _OPTIONS if name in values}
        options.pop("launch_pdl", None)
        signature, constants, attributes = {}, {}, {}
        for index, (name, parameter) in enumerate(zip(names, self.kernel.params, strict=True)):
            value = values[name]
            if parameter.is_constexpr:
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = _TYPES[value.dtype]
                attributes[(index,)] = [["tt.divisibility", 16]]
            else:
                signature[name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                    attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def record(launches: Callable[[], None]) -> list[Call]:
    """What `launches` would have launched."""
    calls: list[Call] = []
    run = JITFunction.run

    def note(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        calls.append(Call(self, args, kwargs))

    JITFunction.run = note
    try:
        launches()
    finally:
        JITFunction.run = run
    return calls


def _empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def step_launches(rows: int, *, pdl: bool) -> None:
    """Every kernel of a verify step of `rows` rows, at the 27B shapes, on tensors without storage."""
    fp32, int64, bf16 = torch.float32, torch.int64, torch.bfloat16
    width, heads, channels = 5120, 48, 10240
    plain = Launch(pdl=pdl)
    positions, tokens = _empty(8, dtype=torch.int32), _empty(32, dtype=int64)
    residual, embedding = _empty(rows, width, dtype=fp32), _empty(1000, width, dtype=bf16)
    gain = _empty(width, dtype=bf16)
    sumsq, x = _empty(rows, width // 32, dtype=fp32), _empty(rows, width)
    embed.embed_rows(
        tokens, positions, embedding, Residual(residual, sumsq, x, gain), last_draft=_empty(1, dtype=int64),
        draft_ids=_empty(40960, dtype=int64), launch=plain,
    )  # fmt: skip
    embed.mtp_input(
        tokens, positions, embedding, _empty(32, width), gain, gain, 1e-6, _empty(rows, 2 * width), residual,
        draft_ids=_empty(40960, dtype=int64), launch=plain,
    )  # fmt: skip
    norm.rms_norm(residual, gain, 1e-6, _empty(rows, width), ring=_empty(32, width), positions=positions, launch=plain)
    weights = gdn_prepare.GdnWeights(
        _empty(heads, width, dtype=bf16), _empty(heads, width, dtype=bf16), _empty(heads, dtype=fp32),
        _empty(heads, dtype=fp32), _empty(channels, 4, dtype=fp32), _empty(128, dtype=bf16),
    )  # fmt: skip
    cache = gdn_prepare.GdnCache.allocate(heads, 128, 128, channels, torch.float16, torch.device("meta"))
    projected, gdn_q = _empty(rows, 16384), _empty(16, 16, 128, dtype=fp32)
    gdn_prepare.gdn_prepare(projected, x, sumsq, weights, cache, gdn_q, 1e-6, positions, launch=plain)
    o = _empty(rows, heads, 128, dtype=fp32)
    gdn_verify.gdn_recur(gdn_q, cache, positions, o, launch=plain)
    gdn_verify.gate_output(o, projected[:, channels:], weights.norm, 1e-6, _empty(rows, 6144), launch=plain)
    qkv, q = _empty(rows, 14336), _empty(rows, 24, 256)
    keys = _empty(4, 65600, 256)
    per_head = _empty(256, dtype=bf16)
    rope_qk.rope_qk(
        qkv, per_head, per_head, 1e-6, _empty(65600, 64, dtype=bf16), positions, q, keys, keys, launch=plain
    )  # fmt: skip
    scratch = _empty(33 * rows * 24 * 256, dtype=fp32)
    verify_attention.verify_attention(
        q, keys, keys, positions, qkv, scratch, scratch, scratch, _empty(rows, 6144), segments=33, launch=plain,
    )  # fmt: skip
    vocabulary = 248_320
    candidates = screened_head.HeadScratch(vocabulary, torch.device("meta"))
    screened_head.decide(
        x, _empty(vocabulary, width, dtype=bf16), _empty(vocabulary, dtype=fp32),
        _empty(rows, vocabulary, dtype=fp32), candidates, tokens, plain,
    )  # fmt: skip
    accept.accept(tokens, tokens, positions, tokens, num_drafts=min(rows - 1, 8), launch=plain)


def prefill_launches(arch: int) -> None:
    """Every Triton kernel of prefill at the 27B shapes; FP8 products are for sm_90 alone."""
    gdn_prefill.example_launches(_empty)
    prefill.example_launches(_empty)
    prompt_rope.example_launches(_empty)
    if arch >= 90:
        prefill_fp8.example_launches(_empty)


def faults(calls: list[Call], arch: int) -> Iterator[tuple[str, str | None]]:
    """(line about the kernel, fault or None) for each call compiled for sm_{arch}."""
    for call in calls:
        compiled = call.compile(arch)
        shared = compiled.metadata.shared
        line = f"sm_{arch} {call.kernel.__name__:24} warps {compiled.metadata.num_warps:2} shared {shared:6}"
        fault = None
        if shared > SHARED_LIMIT_BYTES[arch]:
            fault = f"{shared} bytes of shared memory, the card has {SHARED_LIMIT_BYTES[arch]}"
        elif arch < 89 and "e4m3" in compiled.asm["ptx"]:
            fault = "fp8 type in code for a card without it"
        yield line, fault


def groups(arch: int) -> dict[str, Callable[[], None]]:
    """What is launched together: the steps of each row count, and prefill."""
    steps = {f"step_{rows}_rows": partial(step_launches, rows, pdl=arch >= 90) for rows in ROW_COUNTS}
    return {**steps, "prefill": partial(prefill_launches, arch)}


if __name__ == "__main__":
    arch = int(sys.argv[1])
    for group, launches in groups(arch).items():
        for line, fault in faults(record(launches), arch):
            sys.stdout.write(f"{group} {line} {fault or 'ok'}\n")
