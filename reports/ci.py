"""A gate's outcome for machines and for people who read a pull request: JUnit XML, Markdown, the --json object."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ..gates.outcomes import DepthOutcome, Estimator, GateOutcome, OutputOutcome, Verdict
from ..gates.words import first_token_words
from ..harness.format import count, fixed, percent

STEP_SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"


def gate_json(run_dir: Path, outcome: GateOutcome) -> dict[str, Any]:
    """The contract of `compare --json`: effects as fractions, +0.02 = 2 % slower. output_check is the candidate's."""
    return {
        "run_dir": str(run_dir),
        "verdict": outcome.verdict.value,
        "depths": [_depth_json(depth) for depth in outcome.depths],
        "output_check": _check_json(check_of(outcome, outcome.candidate)),
        "next_step": outcome.next_step,
    }


def check_of(outcome: GateOutcome, build: str) -> OutputOutcome | None:
    """The output check of one build; None where it did not run."""
    return next((check for check in outcome.output_checks if check.build == build), None)


def write_ci_files(run_dir: Path, outcome: GateOutcome) -> tuple[Path, ...]:
    """Writes junit.xml and summary.md; appends the summary to $GITHUB_STEP_SUMMARY where that is set."""
    summary = markdown(outcome)
    junit_path, summary_path = run_dir / "junit.xml", run_dir / "summary.md"
    junit_path.write_text(junit(outcome), encoding="utf-8")
    summary_path.write_text(summary, encoding="utf-8")
    step_summary = os.environ.get(STEP_SUMMARY_VARIABLE)
    if step_summary:
        with Path(step_summary).open("a", encoding="utf-8") as file:
            file.write(summary + "\n")
    return junit_path, summary_path


def junit(outcome: GateOutcome) -> str:
    """One test case for the verdict, one a depth, one a build's output; only what passed has no failure or error."""
    cases = [_case("verdict", outcome.verdict, f"{outcome.sentence} {outcome.next_step}")]
    cases += [
        _case(f"speed at depth {depth.depth}", _depth_verdict(outcome, depth), _depth_text(depth))
        for depth in outcome.depths
    ]
    cases += [_case(f"output of {check.build}", check.verdict, check.reason) for check in outcome.output_checks]
    suite = ElementTree.Element(
        "testsuite",
        name=f"kernarc-gate: {outcome.candidate} against {outcome.baseline}",
        tests=str(len(cases)),
        failures=str(sum(case.find("failure") is not None for case in cases)),
        errors=str(sum(case.find("error") is not None for case in cases)),
    )
    suite.extend(cases)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def markdown(outcome: GateOutcome) -> str:
    """Verdict, one sentence, the table, the output check, the next step."""
    lines = [
        f"## {outcome.verdict.value}: `{outcome.candidate}` against `{outcome.baseline}`",
        "",
        outcome.sentence,
        "",
        *depth_table(outcome),
        *([told, ""] if (told := first_token_words(outcome)) else []),
        *check_table(outcome.output_checks),
    ]
    if outcome.identity:
        lines += [outcome.identity, ""]
    if outcome.order_words:
        lines += [outcome.order_words, ""]
    lines += [f"- {reason}" for reason in outcome.void_reasons]
    lines += [
        f"**Next:** {outcome.next_step}",
        "",
        f"Margin {percent(outcome.margin).lstrip('+')}, {outcome.launches} of at most {outcome.launch_limit} launches, "
        f"run `{outcome.run_id}`. The interval is the wider of the two-level bootstrap's and of Student's t on launch "
        f"means, simultaneous over depths{_estimator_words(outcome)}.",
        "",
    ]
    return "\n".join(lines)


def _estimator_words(outcome: GateOutcome) -> str:
    if outcome.estimator is Estimator.CROSSOVER:
        return "; which engine was started first is taken out (crossover)"
    return "; which engine was started first is not taken out (it takes 4 launches that we start, in both orders)"


def depth_table(outcome: GateOutcome) -> list[str]:
    """Markdown rows of effect, interval and attribution; empty without depths."""
    if not outcome.depths:
        return []
    rows = [
        "| depth | verdict | effect on time per token | interval | step time | acceptance | pairs |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for depth in outcome.depths:
        verdict = _depth_verdict(outcome, depth).value
        note = "IMPROVED" if depth.depth in outcome.improved_depths else verdict
        step, acceptance = effects(depth)
        rows.append(
            f"| {count(depth.depth)} | {note} | {percent(depth.point_estimate)} | {interval(depth)} "
            f"| {percent(step)} | {percent(acceptance)} | {count(depth.pairs)} |"
        )
    return [*rows, ""]


def check_table(checks: Sequence[OutputOutcome]) -> list[str]:
    """Markdown rows of the output check; empty where it did not run."""
    if not checks:
        return []
    rows = [
        "| output of | verdict | tokens | matches | near-ties | divergences | worst gap | reason |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for check in checks:
        worst = "–" if check.worst_gap is None else f"{check.worst_gap:.3g}"
        rows.append(
            f"| {check.build} | {check.verdict.value} | {count(check.positions)} | {count(check.matches)} "
            f"| {count(check.near_ties)} | {count(check.divergences)} | {worst} | {check.reason} |"
        )
    return [*rows, "", *[f"- {check.build}: {text}" for check in checks if (text := rates(check))], ""]


def effects(depth: DepthOutcome) -> tuple[float | None, float | None]:
    """Step and acceptance effect; None where events are not steps."""
    if depth.attribution is None:
        return None, None
    return depth.attribution.step_effect, depth.attribution.acceptance_effect


def rates(check: OutputOutcome) -> str:
    """Match, near-tie and divergence rates with 95 % intervals, clustered by request; "" where nothing was read."""
    named = (("match", check.match_rate), ("near-tie", check.near_tie_rate), ("divergence", check.divergence_rate))
    return ", ".join(
        f"{name} {_percentage(rate.rate)} ({_percentage(rate.low)} to {_percentage(rate.high)})"
        for name, rate in named
        if rate
    )


def interval(depth: DepthOutcome) -> str:
    """ "−0.3 % … +0.8 %"; a dash where it is undefined."""
    if depth.low is None or depth.high is None:
        return percent(None)
    return f"{percent(depth.low)} … {percent(depth.high)}"


def _percentage(share: float) -> str:
    return f"{fixed(share * 100, 2)} %"


def _depth_verdict(outcome: GateOutcome, depth: DepthOutcome) -> Verdict:
    if outcome.void_reasons or outcome.verdict is Verdict.VOID:
        return Verdict.VOID
    if depth.low is None or depth.high is None or outcome.not_restarted:
        return Verdict.INCONCLUSIVE
    if depth.low > outcome.margin:
        return Verdict.FAIL
    return Verdict.PASS if depth.high < outcome.margin else Verdict.INCONCLUSIVE


def _depth_text(depth: DepthOutcome) -> str:
    return f"{percent(depth.point_estimate)} time per token ({interval(depth)}): {depth.words}"


def _case(name: str, verdict: Verdict, text: str) -> ElementTree.Element:
    case = ElementTree.Element("testcase", classname="kernarc-gate", name=name)
    if verdict is not Verdict.PASS:
        kind = "failure" if verdict is Verdict.FAIL else "error"
        ElementTree.SubElement(case, kind, type=verdict.value, message=text)
    return case


def _depth_json(depth: DepthOutcome) -> dict[str, Any]:
    step, acceptance = effects(depth)
    first = depth.first_token
    return {
        "depth": depth.depth,
        "point_estimate": depth.point_estimate,
        "low": depth.low,
        "high": depth.high,
        "bootstrap_low": depth.bootstrap_low,
        "bootstrap_high": depth.bootstrap_high,
        "launches": depth.launches,
        "pairs": depth.pairs,
        "step_effect": step,
        "acceptance_effect": acceptance,
        "ttft_effect": None if first is None else first.effect,
        "ttft_low": None if first is None else first.low,
        "ttft_high": None if first is None else first.high,
    }


def _check_json(check: OutputOutcome | None) -> dict[str, Any]:
    if check is None:
        unchecked = {"positions": 0, "matches": 0, "near_ties": 0, "divergences": 0, "worst_gap": None}
        return {"verdict": Verdict.INCONCLUSIVE.value, **unchecked, "max_divergence_rate": None}
    return {
        "verdict": check.verdict.value,
        "positions": check.positions,
        "matches": check.matches,
        "near_ties": check.near_ties,
        "divergences": check.divergences,
        "worst_gap": check.worst_gap,
        "max_divergence_rate": check.max_divergence_rate,
    }
