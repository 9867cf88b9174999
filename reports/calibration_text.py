"""Tables of `calibrate` on a terminal, and its --json object."""

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ..gates.calibrate.calibrate import Calibration
from ..gates.calibrate.noise_components import NoiseComponents, Recommendation
from ..gates.calibrate.simulate import START_ORDERS, Coverage, Decisions, Simulation
from ..harness.format import count, fixed, percent

# The design's figures of the two-level bootstrap in per cent, by launches: at 40 requests for one launch, else at 20.
PUBLISHED_BOOTSTRAP = {1: 44, 3: 86, 5: 91, 8: 96, 20: 99}

WIDE = 0.99  # coverage of a 95 % interval beyond this is called wider than need be


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
                "order": row.noise.order,
                "order_standard_error": row.noise.order_error,
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
    console.print(_start_order_table(found))
    worst = max(decisions.failed for decisions in (*found.no_effect, *found.at_margin))
    covers = [row.deciding for row in found.coverage]
    comparisons = count(found.no_effect[0].comparisons)
    console.print(f"largest share of false FAILs: {_share(worst)} of {comparisons} comparisons a setting (5 % allowed)")
    console.print(f"coverage of the deciding interval: {_share(min(covers))} to {_share(max(covers))} (nominal 95 %)")
    console.print(_wide(found), markup=False, soft_wrap=True)


def _wide(found: Simulation) -> str:
    """Where the interval is wider than it need be, which costs launches and never a false alarm."""
    wide: dict[str, list[int]] = {}
    for row in found.coverage:
        if row.deciding > WIDE:
            wide.setdefault(_short(row.noise), []).append(row.launches)
    if not wide:
        return f"nowhere wider than need be (over {_share(WIDE)})"
    return f"wider than need be (over {_share(WIDE)}): " + "; ".join(
        f"{name} at {_listed(launches)} launches" for name, launches in wide.items()
    )


def print_calibration(
    found: Calibration, decisions: Sequence[Decisions], looks: Sequence[int], requests_per_depth: int
) -> None:
    """Noise, detectable effects and recommendations of a real A/A; looks and requests: those of the gate."""
    console = Console(highlight=False)
    for reason in found.void_reasons:
        console.print(f"void: {reason}", markup=False, soft_wrap=True)
    if not found.depths:
        console.print(
            "This A/A says nothing. Put right what is named above (a busy machine voids too), and run it again."
        )
        return
    console.print(_noise_table(found, looks))
    for line in _noise_words(found):
        console.print(line, markup=False, soft_wrap=True)
    setting = f"looks after {_listed(looks)} launches, {requests_per_depth} requests a depth in each"
    title = f"the gate under this noise ({setting}), by how much slower every depth is"
    console.print(title, style="italic", markup=False, soft_wrap=True)
    console.print(_power_table(decisions, None))
    for advice in found.recommendations:
        console.print(_advice(advice), markup=False, soft_wrap=True)


def _noise_table(found: Calibration, looks: Sequence[int]) -> Table:
    fewest, most = (count(of(row.pairs for row in found.depths)) for of in (min, max))
    pairs = fewest if fewest == most else f"{fewest} to {most}"
    title = f"noise of this machine, A/A over {found.launches} launches, {pairs} pairs a depth"
    table = Table(title=title, title_justify="left")
    for heading in ("depth", "launch", "request", "second", *(f"after {look}" for look in looks)):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in found.depths:
        seen = [percent(effect) for effect in row.detectable]
        noise = row.noise
        table.add_row(count(row.depth), _share(noise.launch), _share(noise.request), _order(noise), *seen)
    return table


def _order(noise: NoiseComponents) -> str:
    """ "−1.3 % ± 0.8 %"; a dash where start order could not be told apart."""
    if noise.order is None or noise.order_error is None:
        return percent(None)
    return f"{percent(math.expm1(noise.order))} ± {_share(noise.order_error)}"


def _noise_words(found: Calibration) -> list[str]:
    """What the columns mean."""
    lines = [
        "launch: standard deviation between launches of the same code; 0.0 % where the requests' own hides it.",
        "request: standard deviation between pairs of one launch; more requests or more output tokens average it out.",
    ]
    if found.depths[0].noise.order is not None:
        lines.append(
            "second: how much longer a token takes the engine started second, ± its standard error; "
            "the gate removes it from estimates."
        )
    elif found.is_crossover:
        lines.append("second: what being started second does; it takes 4 launches to tell.")
    lines.append("after N: the smallest slowdown at one depth that FAILs 9 times in 10 after N launches.")
    return lines


def _advice(advice: Recommendation) -> str:
    wanted = percent(advice.effect)
    if advice.launches is None:
        return f"to see {wanted}: more than 60 launches; make the machine quieter, or --max-tokens larger"
    launches, requests = advice.launches, advice.requests
    return (
        f"to see {wanted} at every depth: {launches} launches × {requests} requests "
        f"(`looks: [{launches}]`, `requests_per_depth: {requests}` in the gate's configuration)"
    )


def _listed(looks: Sequence[int]) -> str:
    return ", ".join(str(look) for look in looks)


def _design_rows(found: Simulation) -> list[Coverage]:
    """Design noise at the rule's own number of requests, from 3 launches up."""
    return [row for row in found.coverage if row.noise == found.power[0].noise]


def _design_table(found: Simulation) -> Table:
    title = "coverage of the plain formulas under the design's noise (launch 0.5 %, request 2 %)"
    table = Table(title=title, title_justify="left")
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
    table = Table(
        title="coverage of the deciding interval (start order taken out from 4), by launches", title_justify="left"
    )
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


def _start_order_table(found: Simulation) -> Table:
    table = Table(title="a 3 % slowdown where start order matters: taken out, and left in", title_justify="left")
    for heading in ("started second", "FAIL", "launches", "FAIL, left in", "launches, left in"):
        table.add_column(heading, justify="right")
    for order, (rule, plain) in zip(START_ORDERS, found.start_order, strict=True):
        shares = [cell for row in (rule, plain) for cell in (_share(row.failed), fixed(row.mean_launches, 1))]
        table.add_row(percent(order), *shares)
    return table


def _power_table(rows: Sequence[Decisions], title: str | None) -> Table:
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
