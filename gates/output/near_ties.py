"""What rounding may do to greedy text: how far below the top an honest token lies (τ), and how often one is emitted."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..outcomes import Rate

Floats = NDArray[np.float64]

ERROR_RATIO = 2.0  # an engine's error may be this multiple of bf16's: it rounds in other places than the reference
ERROR_RATIOS: list[float] = np.geomspace(ERROR_RATIO, 1000, 256).tolist()
QUANTILE = 0.995  # of errors; the largest of thousands hangs on how many there were
FEWEST_PAIRS = 1000  # so that the quantile rests on five, even where few tokens lie near each other
RULE_OF_THREE = 3  # none seen in n still fits a rate of 3/n at 95 % (Hanley and Lippman-Hand 1983)


@dataclass(frozen=True)
class RoundingErrors:
    """Errors that bf16 makes, in the reference, in the difference of two logits whose order it could change.

    sizes: |error| in logits, sorted [n].
    """

    sizes: Floats

    @classmethod
    def between(cls, exact: Floats, rounded: Floats) -> "RoundingErrors":
        """exact, rounded: fp32 and bf16 logits of the same tokens, fp32's first choice in column 0 [positions, tokens].

        Only pairs with the first choice count, and only those no further apart than twice the largest error: the
        order of others cannot change, and where one token is far ahead the logits, and so bf16's steps, are larger.
        Raises ValueError where a logit is not finite.
        """
        gaps = (exact[:, :1] - exact[:, 1:]).ravel()
        sizes = np.abs(gaps - (rounded[:, :1] - rounded[:, 1:]).ravel())
        if not (np.isfinite(gaps).all() and np.isfinite(sizes).all()):
            raise ValueError("logits that are not finite")
        reach = ERROR_RATIO * float(sizes.max())
        kept = max(FEWEST_PAIRS, int(np.count_nonzero(gaps <= reach)))
        return cls(np.sort(sizes[np.argsort(gaps, kind="stable")[:kept]]))

    @property
    def tau(self) -> float:
        """The largest gap of a near-tie, in logits: ERROR_RATIO × the 99.5 % quantile of the errors.

        An engine emits another token than fp32 only where the gap is below its own error, so gaps end where errors
        do. The quantile is 2.8 σ of normal errors, twice that 5.6 σ: out of reach of an engine that rounds as bf16
        does, while one whose errors are twice as large goes beyond it at one in 10,000 positions of python-7m.
        """
        return ERROR_RATIO * float(np.quantile(self.sizes, QUANTILE))

    def rate(self, leads: Floats, ratio: float = 1.0, beyond: float = 0.0) -> float:
        """Expected share of positions at which an engine with `ratio` times these errors leaves the first choice.

        leads: the reference's first logit − its second [positions]. The mean over positions of P(error > lead), the
        errors being as often positive as negative. beyond: count only positions whose lead is larger than that.
        """
        smaller = np.searchsorted(self.sizes, leads[leads > beyond] / ratio, side="right")
        larger = float((len(self.sizes) - smaller).sum())
        return larger / (2 * len(self.sizes) * len(leads))


@dataclass(frozen=True)
class NearTieLimit:
    """Shares of positions: what bf16 alone gives on this text, and what is let through."""

    bf16_rate: float
    max_rate: float

    @classmethod
    def of(cls, errors: RoundingErrors, leads: Floats, max_divergence_rate: float) -> "NearTieLimit":
        """The limit is what ERROR_RATIO times bf16's errors give on the very positions that are judged.

        Where divergences are allowed, larger errors are: up to those that would themselves diverge at that rate, as
        such an engine has more near-ties than divergences. Never less than three positions.
        """
        tau = errors.tau
        index = bisect_right(ERROR_RATIOS, max_divergence_rate, key=lambda ratio: errors.rate(leads, ratio, tau))
        allowed = errors.rate(leads, ERROR_RATIOS[max(index - 1, 0)])
        return cls(errors.rate(leads), max(allowed, RULE_OF_THREE / len(leads)))

    def complaint(self, found: Rate) -> str | None:
        """Why a build with this near-tie rate fails, or None. Its lower 95 % bound decides, clustered by request."""
        if found.low <= self.max_rate:
            return None
        return (
            f"chooses other than the reference's first choice at {_percent(found.rate)} of positions (at least "
            f"{_percent(found.low)}); bf16 alone does at {_percent(self.bf16_rate)}, and {_percent(self.max_rate)} is "
            "allowed: this looks sampled, or numerically worse than bf16"
        )


def near_tie_limit(
    errors: RoundingErrors | None, leads: Sequence[Floats | None], max_divergence_rate: float
) -> NearTieLimit | None:
    """None where the reference's tokens are known by construction and nothing is ever near."""
    known = [lead for lead in leads if lead is not None]
    if errors is None or not known:
        return None
    return NearTieLimit.of(errors, np.concatenate(known), max_divergence_rate)


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.1f} %"
