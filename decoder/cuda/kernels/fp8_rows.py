"""Activations in FP8, one scale for 128 columns of a row: what FP8 products multiply.

In rows, as cuBLAS reads them, or in tiles of 128 rows x 128 columns, as fp8_swiglu.cu does: a tile is 16 KiB in one
piece, and the 16 bytes u of its row r stand at place u xor (r mod 8), where the tensor cores expect them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .packing import BLOCK

E4M3_MAX = tl.constexpr(448.0)
ROW_MULTIPLE = 4  # cuBLAS wants rows, and scale columns, in fours
TILED_ROW_MULTIPLE = 256  # rows of two CTAs
TILE_BYTES = tl.constexpr(BLOCK * BLOCK)
UNIT = tl.constexpr(16)  # bytes that stay together in a tile


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """values e4m3 [T', K]; scale fp32 [T', K/128] with the rows next to each other in memory, which multiplies.

    `rows` of the T' are real; what the others hold is left open. tiled: values lie in tiles, whatever their shape says.
    """

    values: torch.Tensor
    scale: torch.Tensor
    rows: int
    tiled: bool = False

    @classmethod
    def empty(cls, rows: int, width: int, device: torch.device, *, tiled: bool = False) -> Fp8Rows:
        """Room for `rows` rows, padded to what the product multiplies. width: a multiple of 128."""
        multiple = TILED_ROW_MULTIPLE if tiled else ROW_MULTIPLE
        padded = -(-rows // multiple) * multiple
        values = torch.empty(padded, width, dtype=torch.float8_e4m3fn, device=device)
        scale = torch.empty(width // BLOCK, padded, dtype=torch.float32, device=device).t()
        return cls(values, scale, rows, tiled)


def to_tiles(values: torch.Tensor) -> torch.Tensor:
    """Bytes or e4m3 [R, K], multiples of 128, in rows → the same in tiles."""
    tiles = values.view(torch.uint8).view(len(values) // BLOCK, BLOCK, -1, BLOCK).transpose(1, 2)
    return _swizzled(tiles).view(values.shape).view(values.dtype)


def from_tiles(values: torch.Tensor) -> torch.Tensor:
    """The inverse of to_tiles."""
    tiles = values.view(torch.uint8).view(len(values) // BLOCK, -1, BLOCK, BLOCK)
    return _swizzled(tiles).transpose(1, 2).reshape(values.shape).view(values.dtype)


def _swizzled(tiles: torch.Tensor) -> torch.Tensor:
    """[…, 128, 128]: the units of every row exchanged; twice is not at all."""
    units = tiles.reshape(*tiles.shape[:-1], BLOCK // UNIT.value, UNIT.value)
    row = torch.arange(BLOCK, device=tiles.device)[:, None]
    place = torch.arange(BLOCK // UNIT.value, device=tiles.device)[None, :] ^ row % 8
    return units[..., row, place, :].reshape(tiles.shape)


def rows_in_tiles(x: Fp8Rows) -> Fp8Rows:
    """A copy of `x` in tiles, padded with NaN: for checks of a kernel that reads tiles, without one that stores."""
    rows, width = x.rows, x.values.shape[1]
    out = Fp8Rows.empty(rows, width, x.values.device, tiled=True)
    padded = torch.full_like(out.values, 0x7F, dtype=torch.uint8)
    padded[:rows] = x.values[:rows].view(torch.uint8)
    out.values.view(torch.uint8).copy_(to_tiles(padded))
    out.scale.fill_(float("nan"))
    out.scale[:rows] = x.scale[:rows]
    return out


@triton.jit
def store_fp8(
    y, p_values, p_scale, row, first_block, blocks, scale_stride, B: tl.constexpr, N: tl.constexpr,
    TILED: tl.constexpr = False,
):  # fmt: skip
    """Blocks first_block … of row `row`, fp32 y [N, 128]: values and scales of those below `blocks`.

    One division a block, not one a value; the conversion saturates, so what rounds beyond 448 needs no clamp.
    """
    o_block = tl.arange(0, N)
    inside = first_block + o_block < blocks
    scale = tl.maximum(tl.max(tl.abs(y), axis=1) / E4M3_MAX, 1e-12)
    value = (y * (1.0 / scale)[:, None]).to(p_values.dtype.element_ty)
    column = tl.arange(0, B)[None, :]
    if TILED:
        tile = row // B * blocks + first_block + o_block
        place = (tile * TILE_BYTES + row % B * B)[:, None] + (column // UNIT ^ row % 8) * UNIT + column % UNIT
    else:
        place = (row * blocks + first_block + o_block)[:, None] * B + column
    tl.store(p_values + place, value, mask=inside[:, None])
    tl.store(p_scale + (first_block + o_block) * scale_stride + row, scale, mask=inside)


@triton.jit
def quantise_kernel(p_x, p_values, p_scale, scale_stride, blocks, N: tl.constexpr, B: tl.constexpr):
    """Program t: row t."""
    row = tl.program_id(0).to(tl.int64)
    o_block = tl.arange(0, N)
    place = (row * blocks + o_block)[:, None] * B + tl.arange(0, B)[None, :]
    x = tl.load(p_x + place, mask=(o_block < blocks)[:, None], other=0.0).to(tl.float32)
    store_fp8(x, p_values, p_scale, row, 0, blocks, scale_stride, B, N)


def quantise_rows(x: torch.Tensor) -> Fp8Rows:
    """x [T, K], K a multiple of 128, the largest value of each 128 columns at 448. Twin: quantise_rows_naive."""
    rows, width = x.shape
    out = Fp8Rows.empty(rows, width, x.device)
    blocks = width // BLOCK
    quantise_kernel[(rows,)](
        x, out.values, out.scale, out.scale.stride(1), blocks, N=triton.next_power_of_2(blocks), B=BLOCK, num_warps=8
    )  # fmt: skip
    return out


def quantise_rows_naive(x: torch.Tensor) -> Fp8Rows:
    """Twin."""
    blocks = x.float().view(len(x), -1, BLOCK)
    scale = (blocks.abs().amax(-1) / E4M3_MAX.value).clamp_min(1e-12)
    values = (blocks / scale[..., None]).clamp(-E4M3_MAX.value, E4M3_MAX.value).to(torch.float8_e4m3fn)
    return Fp8Rows(values.view_as(x), scale, len(x))
