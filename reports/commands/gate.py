"""`compare` and `check`: the gate on the command line."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from .bench import comma_list, depth_list, number_list


@click.command()
@click.argument("baseline", required=False)
@click.argument("candidate", required=False)
@click.option("--config", "config_name", default="default", show_default=True, metavar="NAME|PATH", help="A gate.")
@click.option("--depths", callback=depth_list, metavar="N,N", help="Context depths in tokens.")
@click.option("--requests", "requests_per_depth", type=int, metavar="N", help="Requests at each depth in each launch.")
@click.option("--max-tokens", type=int, metavar="N", help="Output tokens of each request.")
@click.option("--looks", callback=number_list, metavar="N,N", help="Launches at which to look; the last is the limit.")
@click.option("--model", "model_path", metavar="DIR", help="Checkpoint for builds that name none.")
@click.option("--seed", type=int, metavar="N", help="Other prompts, another order.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Run directory. [default: runs/RUN_ID]")
@click.option(
    "--resume", type=click.Path(path_type=Path), metavar="RUN_DIR", help="Complete an interrupted comparison."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def compare(
    baseline: str | None,
    candidate: str | None,
    config_name: str,
    model_path: str | None,
    out: Path | None,
    resume: Path | None,
    as_json: bool,
    **changes: Any,
) -> None:
    """Is CANDIDATE slower than BASELINE, and are its answers right?

    A build is a name, a YAML file, git:REF (git:. is the working tree) or endpoint:URL (shown, but not restarted, so
    never decided on speed). Exit code 0 PASS, 1 FAIL (slower or wrong), 2 usage, 3 INCONCLUSIVE, 4 VOID. Leaves
    verdict.json, junit.xml and summary.md in the run directory; appends the summary to $GITHUB_STEP_SUMMARY where set.
    """
    from ...gates.compare import Comparison
    from ...gates.display import GateDisplay
    from ...harness.run.interrupts import sigterm_as_interrupt
    from ..ci import gate_json, write_ci_files
    from ..gate_text import print_outcome

    with GateDisplay() as display, sigterm_as_interrupt():
        if resume is not None:
            if baseline or out or model_path or any(value is not None for value in changes.values()):
                raise click.UsageError("--resume takes everything from the run; give it no other option but --json")
            run, config = _resumed(resume, display)
        elif baseline is None or candidate is None:
            raise click.UsageError("name a BASELINE and a CANDIDATE, as in: compare git:main git:.")
        else:
            run, config = _created((baseline, candidate), config_name, model_path, changes, out, display)
        try:
            outcome = Comparison(run, config, display).decide()
        except KeyboardInterrupt:
            path = run.directory.path
            display.notify(f"what was measured is kept; continue with `kernarc-gate compare --resume {path}`")
            sys.exit(130)
    files = write_ci_files(run.directory.path, outcome)
    if as_json:
        click.echo(json.dumps(gate_json(run.directory.path, outcome)))
    else:
        print_outcome(outcome)
    click.echo(f"{run.directory.path}: verdict.json, {', '.join(file.name for file in files)}", err=True)
    sys.exit(outcome.verdict.exit_code)


def _created(
    specs: tuple[str, str],
    config_name: str,
    model_path: str | None,
    changes: dict[str, Any],
    out: Path | None,
    display: Any,
) -> Any:
    from ...gates.config import GateConfig
    from ...harness.config.builds import resolve_builds
    from ...harness.config.yaml_files import load, override
    from ...harness.run.plan import RunPlan
    from ...harness.run.run import Run

    flags = {**changes, "model": None if model_path is None else {"path": model_path}}
    config = override(load(config_name, GateConfig), flags)
    control = () if config.control is None else (config.control,)
    builds = resolve_builds([*specs, *control], config.model)
    plan = RunPlan.of("compare", config_name, config, builds, config.launch_limit)
    return Run.create(plan, out, display), config


def _resumed(run_dir: Path, display: Any) -> Any:
    from ...gates.config import GateConfig
    from ...harness.config.yaml_files import parse
    from ...harness.errors import ConfigError
    from ...harness.run.completeness import how_to_continue
    from ...harness.run.run import Run

    run = Run.resume(run_dir, display)
    manifest = run.directory.manifest()
    if manifest.kind != "compare":
        raise ConfigError(f"{run_dir} is a {manifest.kind} run", how_to_continue(manifest.kind, run_dir))
    return run, parse(manifest.config_yaml, GateConfig, f"{run_dir}/manifest.json: config_yaml")


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--config", "config_name", metavar="NAME|PATH", help="A gate. [default: the run's own]")
@click.option("--builds", callback=comma_list, metavar="A,B", help="Only these builds of the run.")
@click.option("--model", "model_path", metavar="DIR", help="The checkpoint that was served, where it lies now.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def check(
    run_dir: Path, config_name: str | None, builds: tuple[str, ...] | None, model_path: str | None, as_json: bool
) -> None:
    """Check every output token of a finished run against the reference.

    Exit code 0 where every build's output is right, 1 where one is wrong or a stricter check found it so, 3 where one
    could not be checked, 4 where streams of a launch that was begun are missing or there is nothing sound to check.
    Leaves check.json in the run directory; `report` reads it.
    """
    from rich.console import Console
    from rich.progress import Progress

    from ...gates.compare import output_check_cache, unexpected_is_void
    from ...gates.outcomes import Verdict
    from ...gates.output.check_file import write_check
    from ...gates.output.run_check import RunChecker, void_rules_of
    from ...harness.run.completeness import begun_launches, missing_streams, why_unfinished
    from ...harness.run.storage import RunDirectory
    from ..gate_text import print_checks

    directory = RunDirectory(run_dir)
    manifest = directory.manifest()
    settings = _gate_config_of(manifest, config_name).output_check
    if model_path is not None:
        settings = settings.model_copy(update={"reference_model": _model_folder(model_path)})
    names = _known_builds(builds, [build.name for build in manifest.builds])
    streams, requests = directory.streams(), directory.requests()
    checker = RunChecker(manifest, settings, output_check_cache(), void_rules_of(manifest))
    with Progress(console=Console(stderr=True), transient=True) as progress, unexpected_is_void(run_dir):
        task = progress.add_task("checking outputs", total=None)
        outcomes = checker.check(
            names, streams, requests, lambda done, total: progress.update(task, completed=done, total=total)
        )
        identities = [checker.identity(names[0], name, streams, requests) for name in names[1:]]
    kept = write_check(run_dir, outcomes)
    missing = missing_streams(manifest, streams, names, begun_launches(manifest, streams, requests.values()))
    unfinished = why_unfinished(directory, manifest)
    recorded_failures = [one.build for one in kept if one.is_fail]
    verdict = Verdict.FAIL if recorded_failures else _joint(outcomes)
    if missing and verdict is not Verdict.FAIL:
        verdict = Verdict.VOID
    if as_json:
        found = [json.loads(outcome.model_dump_json()) for outcome in outcomes]
        document = {"run_dir": str(run_dir), "verdict": verdict.value, "output_checks": found}
        document |= {"missing_streams": missing, "standing_failures": recorded_failures, "unfinished": unfinished}
        click.echo(json.dumps(document))
    else:
        print_checks(outcomes, identities)
    _tell(run_dir, manifest.kind, kept, missing, unfinished)
    sys.exit(verdict.exit_code)


def _tell(run_dir: Path, kind: str, kept: Any, missing: dict[str, int], unfinished: str | None) -> None:
    """What the table of a check does not say."""
    from ...harness.run.completeness import how_to_continue

    if unfinished is not None:
        click.echo(f"{run_dir} is unfinished: {unfinished}", err=True)
    for one in kept:
        click.echo(f"{one.build}: {one.reason}", err=True)
    for name, count in missing.items():
        click.echo(
            f"{name}: {count:,} streams are missing from the records: {how_to_continue(kind, run_dir)}", err=True
        )
    click.echo(f"{run_dir}: check.json; `kernarc-gate report {run_dir}` renders the run with it", err=True)


def _gate_config_of(manifest: Any, config_name: str | None) -> Any:
    from ...gates.config import GateConfig
    from ...harness.config.yaml_files import load, parse

    if config_name is not None or manifest.kind != "compare":
        return load(config_name or "default", GateConfig)
    return parse(manifest.config_yaml, GateConfig, "the run's own configuration")


def _model_folder(name: str) -> str:
    from ...harness.config.checkpoints import ensure_checkpoint
    from ...harness.config.models import ModelSource

    return str(ensure_checkpoint(ModelSource(path=name), lambda _: None).path)


def _known_builds(wanted: tuple[str, ...] | None, known: list[str]) -> list[str]:
    from ...harness.errors import ConfigError

    unknown = [name for name in wanted or () if name not in known]
    if unknown:
        raise ConfigError(f"the run has no build {unknown[0]!r}", f"it has {', '.join(known)}")
    return list(wanted or known)


def _joint(outcomes: Any) -> Any:
    """The worst of them: wrong before void before unknown."""
    from ...gates.outcomes import Verdict

    found = {outcome.verdict for outcome in outcomes}
    for verdict in (Verdict.FAIL, Verdict.VOID, Verdict.INCONCLUSIVE):
        if verdict in found:
            return verdict
    return Verdict.PASS if outcomes else Verdict.VOID
