"""Weights in the order linear.cu streams them: 16 KiB chunks of 128 rows, tile-major, padded with zeros."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import CheckpointError

TILE = 128
BLOCK = 128  # rows and columns that share one FP8 scale
UNIT_ROWS = 16
CHUNK_ROW_BYTES = 128
SLICE_ROWS = 64 * BLOCK  # of a vocabulary at a time in fp32: all of it would not fit beside the model
LARGEST_CODE = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


@dataclass(frozen=True)
class PackedLinear:
    """One or several stacked weight matrices, packed.

    weights: uint8, tiles × chunks × 16 KiB. scales: fp32 [scale rows, ⌈K/128⌉], None for bf16.
    scale_rows: int32 [tiles, 8, 2], the scale row of weight rows 0..7 and 8..15 of each 16-row unit.
    scale_mode: 0 where those are one a tile, 1 where one for each half of a unit, 2 otherwise.
    interleaved: gate and up rows alternate by eight, for SWIGLU. n counts rows without padding.
    is_int8: the bytes under scales are int8, else e4m3.
    """

    weights: Tensor
    scales: Tensor | None
    scale_rows: Tensor | None
    n: int
    k: int
    scale_mode: int = 0
    interleaved: bool = False
    is_int8: bool = False

    @property
    def is_fp8(self) -> bool:
        """8 bits with scales (FP8 unless is_int8), else bf16."""
        return self.scales is not None

    @property
    def tiles(self) -> int:
        """Tiles of 128 rows."""
        return -(-self.n // TILE)

    @property
    def chunks(self) -> int:
        """Chunks of 128 FP8 or 64 bf16 columns, a tile."""
        return -(-self.k // (CHUNK_ROW_BYTES if self.is_fp8 else CHUNK_ROW_BYTES // 2))

    @property
    def num_bytes(self) -> int:
        """Bytes one call reads: weights, and scales where there are any."""
        return self.weights.numel() + (self.scales.numel() * 4 if self.scales is not None else 0)


def pack_fp8(parts: list[tuple[Tensor, Tensor]], *, interleave: bool = False, name: str = "weight") -> PackedLinear:
    """Pack FP8 weights stacked along N: parts of (e4m3 [N_i, K], scale [⌈N_i/128⌉, ⌈K/128⌉]), N_i a multiple of 16.

    interleave: two parts of equal shape, gate and up. Raises CheckpointError for NaN weights or misfitting shapes.
    """
    k = parts[0][0].shape[1]
    rows, scale_rows, scales, first_scale_row = [], [], [], 0
    step = 8 if interleave else UNIT_ROWS
    for weight, scale in parts:
        _check_part(weight, k, name)
        raw = weight.view(torch.uint8)
        if bool(((raw & 0x7F) == 0x7F).any()):
            raise CheckpointError(f"{name}: an FP8 weight is NaN", "the checkpoint is damaged: fetch or write it again")
        rows.append(raw)
        of_unit = torch.arange(weight.shape[0] // step, dtype=torch.int32, device=raw.device) * step // BLOCK
        scale_rows.append(of_unit + first_scale_row)
        scales.append(scale.float())
        first_scale_row += scale.shape[0]
    stacked = _interleave(rows) if interleave else torch.cat(rows)
    halves = torch.stack(tuple(scale_rows) if interleave else (torch.cat(scale_rows),) * 2, dim=1)  # [units, 2]
    units = -(-stacked.shape[0] // TILE) * 8
    halves = torch.cat((halves, halves[-1:].expand(units - halves.shape[0], 2))).view(-1, 8, 2).contiguous()
    return PackedLinear(
        _pack_rows(stacked),
        torch.cat(scales).contiguous(),
        halves,
        stacked.shape[0],
        k,
        _scale_mode(halves),
        interleave,
    )


def pack_bf16(weight: Tensor, *, name: str = "weight") -> PackedLinear:
    """Pack weights [N, K] as bf16. Raises CheckpointError for shapes that do not pack."""
    _check_part(weight, weight.shape[1], name)
    rows = weight.to(torch.bfloat16).contiguous().view(torch.uint8)
    return PackedLinear(_pack_rows(rows), None, None, weight.shape[0], weight.shape[1])


def quantise(weight: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """bf16 [N, K] → (e4m3 or int8 [N, K], multiplying scale fp32 a 128×128 block), its largest value at 448 or 127."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK), device=weight.device)
    values = torch.empty_like(weight, dtype=dtype)
    for first in range(0, rows, SLICE_ROWS):
        part = weight[first : first + SLICE_ROWS].float()
        padded = torch.nn.functional.pad(part, (0, -columns % BLOCK, 0, -len(part) % BLOCK))
        blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
        largest = blocks.abs().amax(dim=(1, 3)).clamp_min(1e-12) / LARGEST_CODE[dtype]
        scaled = (blocks / largest[:, None, :, None]).view_as(padded)[: len(part), :columns]
        values[first : first + len(part)] = (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
        scale[first // BLOCK : first // BLOCK + len(largest)] = largest
    return values, scale


def pack_int8(weight: Tensor, scale: Tensor, *, name: str = "weight") -> PackedLinear:
    """Pack int8 weights [N, K] with scale [⌈N/128⌉, ⌈K/128⌉]. Raises CheckpointError for shapes that do not pack."""
    _check_part(weight, weight.shape[1], name)
    units = torch.arange(-(-weight.shape[0] // TILE) * 8, dtype=torch.int32, device=weight.device)
    rows = (units * UNIT_ROWS // BLOCK).view(-1, 8, 1).expand(-1, -1, 2).contiguous()
    packed = _pack_rows(weight.view(torch.uint8))
    n, k = weight.shape
    return PackedLinear(packed, scale.float().contiguous(), rows, n, k, _scale_mode(rows), is_int8=True)


def unpack(packed: PackedLinear) -> Tensor:
    """The inverse: fp32 [N, K] with scales applied, gate rows before up rows where interleaved."""
    # tile, chunk, unit, row group, column slice, g, t, half, bytes
    raw = packed.weights.view(packed.tiles, packed.chunks, 2, 4, 4, 8, 4, 2, 8).permute(0, 3, 2, 7, 5, 1, 4, 6, 8)
    raw = raw.reshape(packed.tiles * TILE, packed.chunks * CHUNK_ROW_BYTES)
    if packed.scales is not None and packed.scale_rows is not None:
        row_scale = packed.scales[packed.scale_rows.long()].repeat_interleave(8, dim=2).flatten(0, 2)  # [rows, ⌈K/128⌉]
        code = torch.int8 if packed.is_int8 else torch.float8_e4m3fn
        values = raw.view(code).float() * row_scale.repeat_interleave(BLOCK, dim=1)
    else:
        values = raw.view(torch.bfloat16).float()
    values = values[: packed.n, : packed.k]
    if packed.interleaved:
        gate_up = values.view(-1, 2, 8, packed.k)
        values = torch.cat((gate_up[:, 0].flatten(0, 1), gate_up[:, 1].flatten(0, 1)))
    return values


def _check_part(weight: Tensor, k: int, name: str) -> None:
    if weight.shape[1] != k or weight.shape[0] % UNIT_ROWS or k % 8:
        raise CheckpointError(
            f"{name}: shape {tuple(weight.shape)} cannot be packed beside K = {k}",
            "rows must be a multiple of 16 and columns of 8; use --device cpu for this checkpoint",
        )


def _interleave(rows: list[Tensor]) -> Tensor:
    gate, up = (part.view(-1, 8, part.shape[1]) for part in rows)  # [I/8, 8, K]
    return torch.stack((gate, up), dim=1).reshape(-1, gate.shape[2])  # [2I, K]


def _scale_mode(halves: Tensor) -> int:
    if bool((halves != halves[:, :1]).any()):
        return 2
    return 1 if bool((halves[:, :, 0] != halves[:, :, 1]).any()) else 0


def _pack_rows(rows: Tensor) -> Tensor:
    """uint8 [N, row bytes] → tile, chunk, unit, row group 4, column slice 4, g 8, t 4, half, 8 bytes."""
    tiles, chunks = -(-rows.shape[0] // TILE), -(-rows.shape[1] // CHUNK_ROW_BYTES)
    padding = (0, chunks * CHUNK_ROW_BYTES - rows.shape[1], 0, tiles * TILE - rows.shape[0])
    if any(padding):
        rows = torch.nn.functional.pad(rows, padding)
    # tile 0, row group 1, unit 2, half 3, g 4, chunk 5, column slice 6, t 7, bytes 8
    fields = rows.reshape(tiles, 4, 2, 2, 8, chunks, 4, 4, 8)
    return fields.permute(0, 5, 2, 1, 6, 4, 7, 3, 8).contiguous().flatten()
