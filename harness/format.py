"""Units and rounding, only here: every printed number of table, chart and page passes through this module.

A value is first settled to six significant digits, then rounded half to even in decimal. So a number printed from
the records, from table.json and from table.csv is the same text, whatever the last bit of a float was.
"""

import re
from decimal import ROUND_HALF_EVEN, Decimal

SIGNIFICANT_DIGITS = 6
MISSING = "–"
DEPTH_UNIT = 1024


def settle(value: float) -> float:
    """The stored form of a number: six significant digits, the same on every machine."""
    return float(f"{value:.{SIGNIFICANT_DIGITS - 1}e}")


def fixed(value: float, decimals: int) -> str:
    """`1234.5` → "1,234.50" for two decimals."""
    exponent = Decimal(1).scaleb(-decimals)
    return f"{Decimal(repr(settle(value))).quantize(exponent, rounding=ROUND_HALF_EVEN):,f}"


def milliseconds(value_ms: float | None) -> str:
    """Two decimals where a kernel change shows, fewer as the number grows: 0.412, 7.15, 123.4, 4,711."""
    if value_ms is None:
        return MISSING
    return fixed(value_ms, _decimals(value_ms, below_one=3, below_hundred=2))


def tokens_per_second(value: float | None) -> str:
    """One decimal as published, none from 10,000 up: 139.9, 1,234.5, 12,346."""
    if value is None:
        return MISSING
    return fixed(value, 0 if abs(value) >= 10_000 else 1)


def tokens_per_step(value: float | None) -> str:
    """Two decimals: 3.28."""
    return MISSING if value is None else fixed(value, 2)


def speed_up(value: float | None) -> str:
    """A ratio of speeds, two decimals, one from 10 up: ×1.67, ×12.3."""
    return MISSING if value is None else f"×{_ratio(value)}"


def speed_up_interval(low: float, high: float) -> str:
    """The two ends of a ratio's interval: 1.61–1.73."""
    return f"{_ratio(low)}–{_ratio(high)}"


def milliseconds_interval(low_ms: float, high_ms: float) -> str:
    """The two ends with the decimals of the larger: 7.02–7.31."""
    decimals = _decimals(high_ms, below_one=3, below_hundred=2)
    return f"{fixed(low_ms, decimals)}–{fixed(high_ms, decimals)}"


def tokens_per_second_interval(low: float, high: float) -> str:
    """The two ends of a speed: 136.8–142.5."""
    return f"{tokens_per_second(low)}–{tokens_per_second(high)}"


def percent(fraction: float | None) -> str:
    """A signed change, one decimal: +2.1 %, −0.3 %."""
    if fraction is None:
        return MISSING
    digits = fixed(abs(fraction) * 100, 1)
    if digits == "0.0":
        return "0.0 %"
    return f"{'+' if fraction > 0 else '−'}{digits} %"


def depth_short(depth: int) -> str:
    """A depth on an axis: 128, 8K, 64K; 1,000 stays itself."""
    if depth >= DEPTH_UNIT and depth % DEPTH_UNIT == 0:
        return f"{depth // DEPTH_UNIT:,}K"
    return f"{depth:,}"


def count(value: int) -> str:
    """A whole number with thousands separated: 65,536."""
    return f"{value:,}"


def axis_number(value: float) -> str:
    """A round number on an axis, without trailing zeros: 0, 40, 2.5, 1,000."""
    text = fixed(value, 4)
    return text.rstrip("0").rstrip(".") if "." in text else text


def seconds(value_ms: float) -> str:
    """Elapsed time of a replay, in seconds from milliseconds: 1.83."""
    return fixed(value_ms / 1000, 2)


def share(fraction: float) -> str:
    """A part of a whole, no sign: 62 %."""
    return f"{fixed(fraction * 100, 0)} %"


def gibibytes(value_bytes: int) -> str:
    """Memory: 80 GiB."""
    return f"{fixed(value_bytes / 2**30, 0)} GiB"


def model_name(model: str) -> str:
    """What a public sheet calls a checkpoint: a hub name as it is, a local path by its last part."""
    is_path = model.startswith(("/", ".", "~")) or "\\" in model
    return model.replace("\\", "/").rstrip("/").split("/")[-1] if is_path else model


def short_hashes(text: str) -> str:
    """Text with every long hexadecimal digest cut to its first 12 digits."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b", r"\1", text)


def _decimals(value: float, below_one: int, below_hundred: int) -> int:
    magnitude = abs(value)
    if magnitude < 1:
        return below_one
    if magnitude < 100:
        return below_hundred
    return 1 if magnitude < 1000 else 0


def _ratio(value: float) -> str:
    return fixed(value, 2 if abs(value) < 10 else 1)
