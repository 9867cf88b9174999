"""A gate's outcome on a terminal: the table, the output check, one plain sentence, the next step."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from ..gates.outcomes import GateOutcome, OutputOutcome, Verdict
from ..gates.words import first_token_words
from ..harness.format import count, percent
from .ci import effects, interval, rates

COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.INCONCLUSIVE: "yellow", Verdict.VOID: "magenta"}


def print_outcome(outcome: GateOutcome, console: Console | None = None) -> None:
    """Everything a person needs to know of a comparison, on standard output."""
    console = console or Console(highlight=False)
    if outcome.depths:
        console.print(_depths(outcome))
    if told := first_token_words(outcome):
        console.print(told, markup=False, soft_wrap=True)
    print_checks(outcome.output_checks, [outcome.identity] if outcome.identity else [], console)
    for reason in outcome.void_reasons:
        console.print(f"void: {reason}", markup=False)
    if outcome.order_words:
        console.print(outcome.order_words, markup=False, soft_wrap=True)
    console.print(outcome.sentence, style=f"bold {COLOURS[outcome.verdict]}", markup=False, soft_wrap=True)
    console.print(outcome.next_step, markup=False, soft_wrap=True)


def print_checks(outcomes: Sequence[OutputOutcome], identities: Sequence[str], console: Console | None = None) -> None:
    """The output check of every build, the worst places, and whether the builds said the same."""
    console = console or Console(highlight=False)
    if outcomes:
        console.print(_checks(outcomes))
    for outcome in outcomes:
        console.print(f"{outcome.build}: {outcome.reason}", markup=False, soft_wrap=True)
        if text := rates(outcome):
            console.print(f"  {text}", markup=False, soft_wrap=True)
        if outcome.repetition_loops:
            loops = f"{count(len(outcome.repetition_loops))} outputs run in a repetition loop"
            console.print(f"  {loops}, first {outcome.repetition_loops[0]}", markup=False, soft_wrap=True)
        for token in outcome.worst:
            gap = "not finite" if token.gap is None else f"{token.gap:.4g}"
            console.print(
                f"  {token.request_id}, output token {token.position}: emitted {token.emitted}, "
                f"the reference prefers {token.preferred}, gap {gap}",
                markup=False,
                soft_wrap=True,
            )
    for identity in identities:
        console.print(identity, markup=False, soft_wrap=True)


def _depths(outcome: GateOutcome) -> Table:
    table = Table(title=f"{outcome.candidate} against {outcome.baseline}", title_justify="left")
    table.add_column("depth", justify="right")
    for heading in ("time/token", "interval", "step time", "acceptance", "pairs"):
        table.add_column(heading, justify="right", no_wrap=True)
    for depth in outcome.depths:
        step, acceptance = effects(depth)
        table.add_row(
            count(depth.depth),
            percent(depth.point_estimate),
            interval(depth),
            percent(step),
            percent(acceptance),
            count(depth.pairs),
        )
    return table


def _checks(outcomes: Sequence[OutputOutcome]) -> Table:
    table = Table(title="output check", title_justify="left")
    table.add_column("build", overflow="fold")
    table.add_column("verdict", no_wrap=True)
    for heading in ("tokens", "matches", "near-ties", "diverged", "gap ≤", "tau"):
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        table.add_row(
            outcome.build,
            f"[{COLOURS[outcome.verdict]}]{outcome.verdict.value}[/]",
            count(outcome.positions),
            count(outcome.matches),
            count(outcome.near_ties),
            count(outcome.divergences),
            "–" if outcome.worst_gap is None else f"{outcome.worst_gap:.3g}",
            "–" if outcome.tau is None else f"{outcome.tau:.3g}",
        )
    return table
