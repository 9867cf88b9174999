"""Tables of `calibrate` on a terminal, and its --json object."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ..gates.calibrate import Calibration
from ..gates.simulate import Coverage, Decisions, Simulation
from .format import count, fixed, percent

# The design's figures of the two-level bootstrap in per cent, by launches: at 40 requests for one launch, else at 20.
PUBLISHED_BOOTSTRAP = {1: 44, 3: 86, 5: 91, 8: 96, 20: 99}


def simulation_json(found: Simulation) -> dict[str, Any]:
    """The contract of `calibrate --json`: the worst false-alarm rate, coverage by launches, power by effect."""
    return {
        "false_alarm_rate": max(decisions.failed for decisions in (*found.no_effect, *found.at_margin)),
        "coverage": {str(row.launches): row.deciding for row in _design_rows(found)},
        "power": [{"effect": row.effect, "detected": row.failed} for row in found.power],
        "comparisons": found.no_effect[0].comparisons,
    }


def calibration_json(
    found: Calibration, decisions: Sequence[Decisions], coverage: Sequence[Coverage]
) -> dict[str, Any]:
    """The same keys for a real A/A, simulated with the noise that it found; plus that noise by depth."""
    return {
        "false_alarm_rate": decisions[0].failed if decisions else None,
        "coverage": {str(row.launches): row.deciding for row in coverage},
        "power": [{"effect": row.effect, "detected": row.failed} for row in decisions],
        "comparisons": decisions[0].comparisons if decisions else 0,
        "void_reasons": list(found.void_reasons),
        "noise": [
            {
                "depth": row.depth,
                "launch": row.noise.launch,
                "request": row.noise.request,
                "detectable": row.detectable[-1],
            }
            for row in found.depths
        ],
        "recommended": [
            {"effect": row.effect, "launches": row.launches, "requests": row.requests} for row in found.recommendations
        ],
    }


def print_simulation(found: Simulation) -> None:
    """Coverage, false alarms and the power curve."""
    console = Console(highlight=False)
    console.print(_design_table(found))
    for name in dict.fromkeys(row.noise for row in found.coverage):
        console.print(f"  {name}", markup=False)
    console.print(_coverage_table(found))
    console.print(_decision_table(found))
    console.print(_power_table(found.power, "power: FAIL where every depth is slower by this much (design noise)"))
    worst = max(decisions.failed for decisions in (*found.no_effect, *found.at_margin))
    covers = [row.deciding for row in found.coverage]
    comparisons = count(found.no_effect[0].comparisons)
    console.print(f"largest share of false FAILs: {_share(worst)} of {comparisons} comparisons a setting (5 % allowed)")
    console.print(f"coverage of the deciding interval: {_share(min(covers))} to {_share(max(covers))} (nominal 95 %)")


def print_calibration(found: Calibration, decisions: Sequence[Decisions], looks: Sequence[int]) -> None:
    """Noise, detectable effects and recommendations of a real A/A."""
    console = Console(highlight=False)
    for reason in found.void_reasons:
        console.print(f"void: {reason}", markup=False)
    if not found.depths:
        return
    table = Table(title=f"noise of this machine, A/A over {found.launches} launches", title_justify="left")
    for heading in ("depth", "launch noise", "request noise", "pairs", *(f"sees after {look}" for look in looks)):
        table.add_column(heading, justify="right")
    for row in found.depths:
        seen = [percent(effect) for effect in row.detectable]
        noise = row.noise
        table.add_row(count(row.depth), _share(noise.launch), _share(noise.request), count(row.pairs), *seen)
    console.print(table)
    console.print(_power_table(decisions, "power with this noise: FAIL where every depth is slower by this much"))
    for advice in found.recommendations:
        wanted = percent(advice.effect)
        if advice.launches is None:
            console.print(f"to see {wanted}: more than 60 launches; this machine is too noisy for it")
        else:
            console.print(f"to see {wanted} at every depth: {advice.launches} launches × {advice.requests} requests")


def _design_rows(found: Simulation) -> list[Coverage]:
    """Design noise at the rule's own number of requests, from 3 launches up."""
    return [row for row in found.coverage if row.noise == found.power[0].noise]


def _design_table(found: Simulation) -> Table:
    table = Table(title="coverage under the design's noise (launch 0.5 %, request 2 %)", title_justify="left")
    for heading in ("requests", "launches", "two-level bootstrap", "published", "Student t", "deciding"):
        table.add_column(heading, justify="right")
    for row in found.design_coverage:
        expected = PUBLISHED_BOOTSTRAP.get(row.launches) if (row.requests == 20) != (row.launches == 1) else None
        published = "" if expected is None else f"{expected} %"
        student, deciding = ("–", "–") if row.launches < 2 else (_share(row.student), _share(row.deciding))
        table.add_row(count(row.requests), count(row.launches), _share(row.bootstrap), published, student, deciding)
    return table


def _coverage_table(found: Simulation) -> Table:
    launches = sorted({row.launches for row in found.coverage})
    table = Table(title="coverage of the deciding interval, by launches", title_justify="left")
    table.add_column("noise", no_wrap=True)
    for number in launches:
        table.add_column(count(number), justify="right")
    names = list(dict.fromkeys(row.noise for row in found.coverage))
    for name in names:
        of_noise = {row.launches: row.deciding for row in found.coverage if row.noise == name}
        table.add_row(_short(name), *(_share(of_noise[number]) for number in launches))
    return table


def _decision_table(found: Simulation) -> Table:
    table = Table(
        title="decisions without an effect and with one exactly on the margin, looks included", title_justify="left"
    )
    table.add_column("noise", no_wrap=True)
    for heading in ("false FAIL", "PASS", "launches", "FAIL at margin", "PASS at margin"):
        table.add_column(heading, justify="right")
    for equal, margin in zip(found.no_effect, found.at_margin, strict=True):
        table.add_row(
            _short(equal.noise),
            _share(equal.failed),
            _share(equal.passed),
            fixed(equal.mean_launches, 1),
            _share(margin.failed),
            _share(margin.passed),
        )
    return table


def _power_table(rows: Sequence[Decisions], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("true slowdown", "FAIL", "PASS", "launches"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(percent(row.effect), _share(row.failed), _share(row.passed), fixed(row.mean_launches, 1))
    return table


def _short(name: str) -> str:
    """A noise's name without its explanation."""
    return name.partition(":")[0]


def _share(fraction: float) -> str:
    return f"{fixed(fraction * 100, 1)} %"
