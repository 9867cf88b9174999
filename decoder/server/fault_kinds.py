"""Test plants: known faults put into a server on purpose, so that a gate can be seen to catch them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import RequestError


@dataclass(frozen=True, slots=True)
class PlantKind:
    """about: its line in --help; low … high: values it takes; default: the value of a bare name."""

    about: str
    low: float
    high: float
    default: float


PLANTS: dict[str, PlantKind] = {
    "step_delay": PlantKind("every step takes this fraction longer", 0.0, 100.0, 0.05),
    "reject_drafts": PlantKind("each draft is spoilt with this probability: same text, fewer tokens a step", 0, 1, 0.3),
    "wrong_token": PlantKind("each token is replaced with this probability", 0, 1, 0.01),
    "drop_token": PlantKind("each token is left out with this probability", 0, 1, 0.01),
    "truncate": PlantKind("the output ends after so many tokens", 1, 1e9, 16),
    "sampled": PlantKind("tokens are sampled at this temperature, not greedy", 0.0, 100.0, 1.0),
    "wrong_scale": PlantKind("one 128×128 block of one linear is multiplied by this", -1e6, 1e6, 1024.0),
    "nan": PlantKind("so many weights are NaN", 1, 1e6, 1),
    "stale_kv": PlantKind("beyond this position, keys and values are those of 64 tokens before", 64, 1e9, 512),
    "shifted_position": PlantKind("decoded tokens are rotated to a position this far off", 1, 1e6, 1),
}
OUTPUT_PLANTS = ("step_delay", "wrong_token", "drop_token", "truncate")


def plant_help() -> str:
    """The plants and their meanings, a line each, for --help."""
    return "\n".join(f"  {f'{name}={kind.default:g}':20} {kind.about}" for name, kind in PLANTS.items())


def parse_plants(texts: Sequence[str]) -> dict[str, float]:
    """NAME or NAME=VALUE → value by name. Raises RequestError naming what is wrong."""
    values = {}
    for text in texts:
        name, _, value = text.partition("=")
        kind = PLANTS.get(name)
        if kind is None:
            raise RequestError(f"there is no test plant {name!r}", f"choose from {', '.join(PLANTS)}")
        try:
            values[name] = float(value) if value else kind.default
        except ValueError:
            raise RequestError(f"test plant {name}: {value!r} is not a number") from None
        if not kind.low <= values[name] <= kind.high:
            raise RequestError(f"test plant {name} is {value}, expected {kind.low:g} … {kind.high:g}")
    return values
