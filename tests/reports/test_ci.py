"""JUnit, Markdown and the --json object of made-up outcomes: only a pass looks like one."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from kernarc.gates.outcomes import Attribution, DepthOutcome, GateOutcome, OutputOutcome, Verdict
from kernarc.gates.words import with_words
from kernarc.reports.ci import gate_json, junit, markdown, write_ci_files


def depth(low: float | None, high: float | None, depth: int = 8192) -> DepthOutcome:
    estimate = 0.0 if low is None or high is None else (low + high) / 2
    return DepthOutcome(
        depth=depth,
        point_estimate=estimate,
        low=low,
        high=high,
        bootstrap_low=low,
        bootstrap_high=high,
        student_low=low,
        student_high=high,
        launches=5,
        pairs=100,
        attribution=Attribution(
            step_effect=estimate,
            step_low=low,
            step_high=high,
            acceptance_effect=0.0,
            acceptance_low=0.0,
            acceptance_high=0.0,
        ),
    )


def outcome(verdict: Verdict, *depths: DepthOutcome, void_reasons: tuple[str, ...] = ()) -> GateOutcome:
    checks = [
        OutputOutcome(
            build=build, verdict=Verdict.PASS, reason="right", positions=1000, matches=999, near_ties=1, worst_gap=0.02
        )
        for build in ("main@1", "HEAD@2")
    ]
    return with_words(
        GateOutcome(
            run_id="compare-1",
            baseline="main@1",
            candidate="HEAD@2",
            verdict=verdict,
            speed_verdict=verdict,
            improved_depths=(),
            margin=0.01,
            confidence=0.983,
            launches=5,
            launch_limit=12,
            depths=depths,
            output_checks=tuple(checks),
            identity="greedy ids: equal",
            void_reasons=void_reasons,
            launches_needed=20 if verdict is Verdict.INCONCLUSIVE else None,
            seconds_a_launch=60.0,
        )
    )


PASSED = outcome(Verdict.PASS, depth(-0.004, 0.006))
FAILED = outcome(Verdict.FAIL, depth(-0.004, 0.006, 128), depth(0.03, 0.05))
UNDECIDED = outcome(Verdict.INCONCLUSIVE, depth(-0.01, 0.02))
VOID = outcome(Verdict.VOID, void_reasons=("depth 128: 1 pair missing",))


@pytest.mark.parametrize(
    ("result", "failures", "errors"), [(PASSED, 0, 0), (FAILED, 2, 0), (UNDECIDED, 0, 2), (VOID, 0, 1)]
)
def test_junit_counts_what_did_not_pass(result: GateOutcome, failures: int, errors: int) -> None:
    suite = ElementTree.fromstring(junit(result))
    assert (suite.get("failures"), suite.get("errors")) == (str(failures), str(errors))
    assert len(suite.findall("testcase")) == int(suite.get("tests") or 0)
    assert len(suite.findall("*/failure")) == failures
    assert len(suite.findall("*/error")) == errors


def test_junit_escapes_names() -> None:
    odd = FAILED.model_copy(update={"candidate": 'a<"&b'})
    assert 'a<"&b' in (ElementTree.fromstring(junit(odd)).get("name") or "")


def test_markdown_leads_with_the_verdict_and_ends_with_the_next_step() -> None:
    text = markdown(FAILED)
    assert text.startswith("## FAIL: `HEAD@2` against `main@1`")
    assert "| 8,192 | FAIL | +4.0 % | +3.0 % … +5.0 % | +4.0 % | 0.0 % | 100 |" in text
    assert "| HEAD@2 | PASS | 1,000 | 999 | 1 | 0 | 0.02 | right |" in text
    assert "**Next:** Look for the cost at depth 8,192" in text


def test_void_names_its_reason() -> None:
    assert "- depth 128: 1 pair missing" in markdown(VOID)


def test_inconclusive_says_how_many_launches_and_how_long() -> None:
    assert "About 20 launches would settle it, about 20 minutes" in UNDECIDED.next_step


def test_files_and_step_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "step.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    files = write_ci_files(tmp_path, FAILED)
    assert [file.name for file in files] == ["junit.xml", "summary.md"]
    assert summary.read_text() == "before\n" + markdown(FAILED) + "\n"
    monkeypatch.delenv("GITHUB_STEP_SUMMARY")
    write_ci_files(tmp_path, PASSED)
    assert summary.read_text().count("##") == 1


def test_json_has_the_contracted_keys() -> None:
    found = gate_json(Path("runs/x"), FAILED)
    assert list(found) == ["run_dir", "verdict", "depths", "output_check", "next_step"]
    assert list(found["depths"][0]) == [
        "depth",
        "point_estimate",
        "low",
        "high",
        "bootstrap_low",
        "bootstrap_high",
        "launches",
        "pairs",
        "step_effect",
        "acceptance_effect",
        "ttft_effect",
        "ttft_low",
        "ttft_high",
    ]
    assert list(found["output_check"]) == [
        "verdict",
        "positions",
        "matches",
        "near_ties",
        "divergences",
        "worst_gap",
        "max_divergence_rate",
    ]
    unchecked = gate_json(Path("x"), FAILED.model_copy(update={"output_checks": ()}))["output_check"]
    assert (unchecked["verdict"], unchecked["positions"], unchecked["worst_gap"]) == ("INCONCLUSIVE", 0, None)
