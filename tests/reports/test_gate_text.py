"""A gate's outcome on a terminal."""

from io import StringIO

from kernarc.gates.outcomes import EmittedToken, OutputOutcome, Verdict
from kernarc.reports.gate_text import print_checks
from rich.console import Console


def test_a_gap_that_no_number_says_is_called_so() -> None:
    """Of a known output every wrong token is infinitely far off, which records keep as null, as they do NaN."""
    places = [
        EmittedToken(request_id="r", depth=128, position=at, emitted=5, preferred=6, gap=gap)
        for at, gap in enumerate((None, 0.25))
    ]
    text = StringIO()
    outcome = OutputOutcome(build="a", verdict=Verdict.FAIL, reason="why", worst=tuple(places))
    print_checks([outcome], [], Console(file=text))
    said = [line.rpartition("gap ")[2] for line in text.getvalue().splitlines() if "the reference prefers" in line]
    assert said == ["not finite", "0.25"]
