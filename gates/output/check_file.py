"""check.json, and which of two output checks of one build counts: the later, but a lenient one undoes no FAIL."""

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from ...harness.errors import RecordError
from ...harness.run.records import Record
from ...harness.run.storage import RunDirectory
from ..outcomes import OutputOutcome, Verdict

CHECK_FILE = "check.json"
CHECK_FILES = ("verdict.json", CHECK_FILE)  # the later one, where both are there


class _Checks(Record):
    output_checks: list[OutputOutcome]


@dataclass(frozen=True)
class KeptCheck:
    """An earlier finding that this check does not replace, and why. is_fail: a FAIL that was judged more strictly."""

    build: str
    is_fail: bool
    reason: str


def write_check(run_dir: Path, outcomes: list[OutputOutcome]) -> list[KeptCheck]:
    """check.json: what `check` found, beside the records it judged → what it left as it was.

    An earlier finding stays for builds not asked about, where this time nothing could be read, and where it is a FAIL
    that this check was too lenient to undo.
    """
    earlier = {outcome.build: outcome for outcome in saved_outcomes(run_dir / CHECK_FILE)}
    counting = counting_outcomes(run_dir)
    found_kept = [_kept(run_dir, counting.get(o.build), earlier.get(o.build), o) for o in outcomes]
    kept = {one.build: one for one in found_kept if one is not None}
    found = {**earlier, **{outcome.build: outcome for outcome in outcomes if outcome.build not in kept}}
    content = {"output_checks": [json.loads(outcome.model_dump_json()) for outcome in found.values()]}
    RunDirectory(run_dir).write_document(CHECK_FILE, json.dumps(content, indent=2))
    return list(kept.values())


def _kept(
    run_dir: Path, counting: OutputOutcome | None, in_check: OutputOutcome | None, now: OutputOutcome
) -> KeptCheck | None:
    if counting is not None and counting_check(counting, now) is not now:
        anew = f"delete {run_dir / CHECK_FILE}" if counting == in_check else "compare again"
        return KeptCheck(now.build, True, f"the earlier FAIL stands, because {_weaker(counting, now)}; or {anew}")
    if now.positions == 0 and in_check is not None and in_check.positions:
        return KeptCheck(now.build, False, f"{CHECK_FILE} keeps what an earlier check found")
    return None


def _weaker(earlier: OutputOutcome, now: OutputOutcome) -> str:
    """What a check lacked to undo a FAIL, and what would."""
    if now.positions == 0:
        return "this time nothing could be read: see the reason, and check again"
    rates = [f"{100 * (check.max_divergence_rate or 0.0):.4g} %" for check in (earlier, now)]
    taus = ["none" if check.tau is None else f"{check.tau:.3g}" for check in (earlier, now)]
    return (
        f"it allowed less ({rates[0]} of a stream's tokens to diverge, τ {taus[0]}) than this check ({rates[1]}, "
        f"τ {taus[1]}): check again with a configuration that allows no more"
    )


def counting_check(earlier: OutputOutcome | None, later: OutputOutcome) -> OutputOutcome:
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


def read_document(path: Path) -> dict[str, object] | None:
    """A JSON object beside the records, None where the file is absent."""
    if not path.exists():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read as JSON: {error}", "run the command that wrote it again") from error
    if not isinstance(document, dict):
        raise RecordError(f"{path} holds no JSON object", "run the command that wrote it again")
    return document


def saved_outcomes(path: Path) -> list[OutputOutcome]:
    """The output checks of verdict.json or check.json; none where there is no file."""
    document = read_document(path)
    if document is None:
        return []
    try:
        return _Checks.model_validate_json(json.dumps({"output_checks": document.get("output_checks")})).output_checks
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise RecordError(f"{path}: {where}: {problem['msg']}", "run `kernarc-gate check RUN_DIR` again") from error


def counting_outcomes(run_dir: Path) -> dict[str, OutputOutcome]:
    """The output check of every build that counts, by the gate and by `check`; a lenient one undoes no FAIL."""
    found: dict[str, OutputOutcome] = {}
    for name in CHECK_FILES:
        for outcome in saved_outcomes(run_dir / name):
            found[outcome.build] = counting_check(found.get(outcome.build), outcome)
    return found
