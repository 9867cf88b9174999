"""Which of two output checks of one build counts: the later, except that a more lenient one does not undo a FAIL."""

from ..outcomes import OutputOutcome, Verdict


def standing(earlier: OutputOutcome | None, later: OutputOutcome) -> OutputOutcome:
    """The one of the two that counts. A FAIL yields only to a check that allowed no more than it did."""
    if earlier is not None and earlier.verdict is Verdict.FAIL and not is_as_strict(later, earlier):
        return earlier
    return later


def is_as_strict(later: OutputOutcome, earlier: OutputOutcome) -> bool:
    """Whether later let through no more than earlier: no higher allowance, no higher τ; not where later read nothing.

    An earlier check that does not say what it allowed is taken to have allowed nothing.
    """
    if later.max_divergence_rate is None or later.tau is None:
        return False
    allows_no_more = later.max_divergence_rate <= (earlier.max_divergence_rate or 0.0)
    return allows_no_more and (earlier.tau is None or later.tau <= earlier.tau)
