"""Random weights as raw bits, fast: 16 random bits index a table of 65,536 normal quantiles already rounded."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

E4M3_MAX = 448.0
CHUNK = 1 << 16  # table lookups per call: small enough to stay in cache


def to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Raw bits of finite float32 values rounded to the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """float32 values of raw bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class NormalBits:
    """Draws normal values of standard deviation `std`, as bfloat16 bits or as e4m3 bits to be multiplied by `scale`."""

    def __init__(self, std: float, *, fp8: bool = False) -> None:
        self.fp8 = fp8
        self.scale = std / _e4m3_codes()[1] if fp8 else 1.0
        self._table = _e4m3_pairs() if fp8 else to_bf16(_normal_quantiles(1 << 16) * np.float32(std))

    def draw(self, count: int, seed: tuple[int, ...]) -> NDArray[Any]:
        """`count` values, uint8 for FP8 and uint16 for bfloat16; the same for the same seed."""
        words = -(-count // 2) if self.fp8 else count
        rng = np.random.Generator(np.random.SFC64(seed))
        out = np.empty(words, np.uint16)
        for start in range(0, words, CHUNK):
            size = min(CHUNK, words - start)
            index = rng.integers(0, 1 << 64, size=-(-size // 4), dtype=np.uint64).view(np.uint16)[:size]
            np.take(self._table, index, out=out[start : start + size], mode="clip")
        return out.view(np.uint8)[:count] if self.fp8 else out

    def rows(self, columns: int, seed: int, name: str) -> Callable[[int, int], NDArray[Any]]:
        """rows(first, last) for a tensor of `columns` a row; each call has a stream of its own."""
        return lambda first, last: self.draw((last - first) * columns, (seed, 4, first, *name.encode()))

    def table(self, shape: tuple[int, int], seed: tuple[int, ...]) -> Callable[[], NDArray[Any]]:
        """A whole matrix, made at the first call on all cores."""
        rows, columns = shape
        step = max(1, (4 << 20) // columns)

        lock = Lock()

        @lru_cache(maxsize=1)
        def make() -> NDArray[Any]:
            out = np.empty(shape, np.uint8 if self.fp8 else np.uint16)

            def fill(first: int) -> None:
                last = min(first + step, rows)
                out[first:last] = self.draw((last - first) * columns, (*seed, first)).reshape(-1, columns)

            with ThreadPoolExecutor() as pool:
                list(pool.map(fill, range(0, rows, step)))
            return out

        def make_once() -> NDArray[Any]:
            with lock:
                return make()

        return make_once


def _normal_quantiles(count: int) -> NDArray[np.float32]:
    probabilities = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    quantiles: NDArray[np.float32] = torch.special.ndtri(probabilities).float().numpy()
    return quantiles


@lru_cache(maxsize=1)
def _e4m3_codes() -> tuple[NDArray[np.uint8], float]:
    """256 e4m3 codes at normal quantiles, the largest ±448, and their standard deviation."""
    quantiles = torch.from_numpy(_normal_quantiles(256))
    codes = (quantiles * (E4M3_MAX / quantiles.max())).to(torch.float8_e4m3fn)
    bits: NDArray[np.uint8] = codes.view(torch.uint8).numpy()
    return bits, float(codes.float().square().mean().sqrt())


@lru_cache(maxsize=1)
def _e4m3_pairs() -> NDArray[np.uint16]:
    codes = _e4m3_codes()[0].astype(np.uint16)
    index = np.arange(1 << 16)
    pairs: NDArray[np.uint16] = codes[index & 255] | (codes[index >> 8] << 8)
    return pairs
