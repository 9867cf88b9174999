"""`python -m kernarc.gates.prove`: the gate on real engines of this machine, sound and planted; prints what it decided.

Every case is the real command line. Speed is judged on the small structured checkpoint, whose acceptance is known,
faults inside the model on the shipped trained one, whose answers hang on them. Exit code 1 where one is unexpected.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import click

QUICK = ("--requests", "10", "--max-tokens", "48", "--looks", "3")
LARGE = ("--requests", "10", "--max-tokens", "48", "--looks", "4,8")
FULL = ("--requests", "20", "--max-tokens", "64", "--looks", "5,8,12")
TRAINED = "python-7m"
PACKAGE = (__package__ or "").partition(".")[0]
JsonObject = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A candidate with a planted fault ("" for none), how it is measured, and what the gate has to say."""

    name: str
    plant: str
    arguments: tuple[str, ...]
    expected: str
    is_expected: Callable[[JsonObject], bool]
    on_trained_model: bool = False


def _is_attributed_to(largest: str, other: str) -> Callable[[JsonObject], bool]:
    def holds(outcome: JsonObject) -> bool:
        depths = outcome["depths"]
        is_clear = all(abs(depth[largest]) > 2 * abs(depth[other]) for depth in depths)
        return bool(outcome["verdict"] == "FAIL" and is_clear)

    return holds


def _is_wrong_output(outcome: JsonObject) -> bool:
    return bool(outcome["verdict"] == outcome["output_check"]["verdict"] == "FAIL")


def _is_stopped(outcome: JsonObject) -> bool:
    return outcome["verdict"] in ("FAIL", "VOID")


CASES = (
    Case(
        "5 % slower steps",
        "step_delay=0.05",
        FULL,
        "FAIL, from the step",
        _is_attributed_to("step_effect", "acceptance_effect"),
    ),
    Case(
        "drafts rejected at equal step time",
        "reject_drafts=0.3",
        LARGE,
        "FAIL, from acceptance",
        _is_attributed_to("acceptance_effect", "step_effect"),
    ),
    Case("wrong tokens", "wrong_token=0.01", QUICK, "FAIL, output", _is_wrong_output),
    Case("dropped tokens", "drop_token=0.01", QUICK, "FAIL, output", _is_wrong_output),
    Case("truncated output", "truncate=16", QUICK, "FAIL or VOID", _is_stopped),
    Case("NaN weights", "nan", QUICK, "FAIL or VOID", _is_stopped, on_trained_model=True),
    Case("stale KV beyond 64 tokens", "stale_kv=64", QUICK, "FAIL or VOID", _is_stopped, on_trained_model=True),
    Case("one scale block off by 64", "wrong_scale=64", QUICK, "FAIL or VOID", _is_stopped, on_trained_model=True),
    Case("sampled, not greedy", "sampled=1", QUICK, "FAIL or VOID", _is_stopped, on_trained_model=True),
)


@click.command()
@click.option("--runs", default=20, show_default=True, help="A/A comparisons of kernarc with itself.")
@click.option("--depths", default="128", show_default=True, help="Context depths of every case.")
@click.option("--only", default="", help="Only cases whose name holds this text.")
def main(runs: int, depths: str, only: str) -> None:
    """Runs A/A comparisons and planted faults; prints one line each and a summary."""
    with tempfile.TemporaryDirectory(prefix="kernarc-prove-") as folder:
        sound = Case("A/A", "", QUICK, "not FAIL", lambda outcome: outcome["verdict"] in ("PASS", "INCONCLUSIVE"))
        cases = [sound] * (runs if only in sound.name else 0) + [case for case in CASES if only in case.name]
        failed = sum(not _run(case, number, len(cases), depths, Path(folder)) for number, case in enumerate(cases))
    click.echo(f"{len(cases) - failed} of {len(cases)} as expected")
    sys.exit(1 if failed else 0)


def _run(case: Case, number: int, total: int, depths: str, folder: Path) -> bool:
    candidate = "kernarc"
    if case.plant:
        candidate = str(folder / f"planted-{number}.yaml")
        arguments = json.dumps(["--plant", case.plant])
        Path(candidate).write_text(f"engine: kernarc\nnum_speculative_tokens: 3\nextra_args: {arguments}\n")
    started = time.monotonic()
    out = folder / f"run-{number}"
    trained = resources.files(f"{PACKAGE}.configs") / "models" / TRAINED
    flags: Sequence[str] = ["--model", str(trained)] if case.on_trained_model else []
    flags = [*flags, *case.arguments, "--depths", depths, "--seed", str(number), "--out", str(out), "--json"]
    command = [sys.executable, "-m", "kernarc.cli", "compare", "kernarc", candidate, *flags]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    took_s = time.monotonic() - started
    try:
        outcome = json.loads(result.stdout)
    except ValueError:
        click.echo(f"[{number + 1}/{total}] {case.name}: no outcome, exit code {result.returncode}\n{result.stderr}")
        return False
    good = case.is_expected(outcome)
    effects = ", ".join(_effect(depth) for depth in outcome["depths"]) or "no pairs"
    mark = "as expected" if good else f"NOT as expected ({case.expected})"
    verdict = f"{outcome['verdict']} (exit {result.returncode}), output {outcome['output_check']['verdict']}"
    click.echo(f"[{number + 1}/{total}] {case.name}: {verdict}, {effects}; {took_s:.0f} s; {mark}")
    return good


def _effect(depth: JsonObject) -> str:
    bounds = "no interval" if depth["low"] is None else f"{depth['low']:+.1%} … {depth['high']:+.1%}"
    split = ""
    if depth["step_effect"] is not None:
        split = f", step {depth['step_effect']:+.1%}, acceptance {depth['acceptance_effect']:+.1%}"
    return f"depth {depth['depth']}: {depth['point_estimate']:+.1%} ({bounds}{split}, {depth['launches']} launches)"


if __name__ == "__main__":
    main()
