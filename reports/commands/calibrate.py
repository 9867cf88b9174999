"""`calibrate`: how often the gate is wrong under known noise, and what a real A/A says about this machine."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from .bench import depth_list

SIMULATION_SEED = 20261130


@click.command()
@click.option("--simulate", "is_simulation", is_flag=True, help="Known noise, no engine.")
@click.option("--build", metavar="B", help="A real A/A of this build on this machine.")
@click.option("--config", "config_name", default="default", show_default=True, metavar="NAME|PATH", help="A gate.")
@click.option("--comparisons", default=2000, show_default=True, type=click.IntRange(100), help="Simulated, a setting.")
@click.option("--launches", default=5, show_default=True, type=click.IntRange(2), help="Of the A/A.")
@click.option("--depths", callback=depth_list, metavar="N,N", help="Context depths of the A/A.")
@click.option("--requests", "requests_per_depth", type=int, metavar="N", help="Requests at each depth in each launch.")
@click.option("--max-tokens", type=int, metavar="N", help="Output tokens of each request.")
@click.option("--model", "model_path", metavar="DIR", help="Checkpoint for a build that names none.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Run directory. [default: runs/RUN_ID]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def calibrate(
    is_simulation: bool,
    build: str | None,
    config_name: str,
    comparisons: int,
    launches: int,
    model_path: str | None,
    out: Path | None,
    as_json: bool,
    **changes: Any,
) -> None:
    """A/A false alarms, interval coverage and the smallest effect the gate can see.

    --simulate: the very code that decides, on known noise, about three minutes on two cores. --build: both sides of a
    comparison are B; reports the noise found here (of launches, of requests, of which engine is started second), the
    smallest slowdown the configured looks can see, and how many launches × requests a wanted effect takes.
    """
    if is_simulation == (build is not None):
        raise click.UsageError("choose --simulate, or --build B")
    from ...gates.config import GateConfig
    from ...harness.config.yaml_files import load, override

    flags = {**changes, "model": None if model_path is None else {"path": model_path}}
    config = override(load(config_name, GateConfig), flags)
    if build is None:
        _simulate(config, comparisons, as_json)
    else:
        _measure(config, config_name, build, launches, comparisons, out, as_json)


def _simulate(config: Any, comparisons: int, as_json: bool) -> None:
    from ...gates.calibrate.calibrate import rule_of
    from ...gates.calibrate.simulate import simulate
    from ..calibration_text import print_simulation, simulation_json

    with _progress() as progress:
        task = progress.add_task("simulating", total=None)
        found = simulate(
            rule_of(config, depths=4),
            comparisons,
            SIMULATION_SEED,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    if as_json:
        click.echo(json.dumps(simulation_json(found)))
    else:
        print_simulation(found)


def _measure(
    config: Any, config_name: str, build: str, launches: int, comparisons: int, out: Path | None, as_json: bool
) -> None:
    from ...gates.calibrate.calibrate import calibrate as calibrate_run
    from ...gates.calibrate.calibrate import found_noise, rule_of
    from ...gates.calibrate.simulate import Coverage, Decisions, simulate_noise
    from ...gates.compare import Measured
    from ...harness.config.builds import resolve_builds
    from ...harness.run.interrupts import sigterm_as_interrupt
    from ...harness.run.plan import RunPlan
    from ...harness.run.progress import ProgressDisplay
    from ...harness.run.run import Run
    from ..calibration_text import calibration_json, print_calibration

    plan = RunPlan.of("calibrate", config_name, config, resolve_builds([build, build], config.model), launches)
    with ProgressDisplay() as display, sigterm_as_interrupt():
        run = Run.create(plan, out, display)
        display.begin(run)
        run.measure()
    measured = Measured(run.directory.manifest(), run.directory.streams(), launches)
    if measured.not_restarted:
        click.echo(f"{build} is not restarted: noise between launches is not in what follows", err=True)
    found = calibrate_run(measured, config)
    decisions: tuple[Decisions, ...] = ()
    coverage: tuple[Coverage, ...] = ()
    if found.depths:
        rule = rule_of(config, is_crossover=found.is_crossover)
        with _progress() as progress:
            task = progress.add_task("simulating the gate under this noise", total=None)
            decisions, coverage = simulate_noise(
                found_noise(found),
                rule,
                comparisons,
                SIMULATION_SEED,
                lambda done, total: progress.update(task, completed=done, total=total),
            )
    if as_json:
        click.echo(json.dumps(calibration_json(found, decisions, coverage)))
    else:
        print_calibration(found, decisions, config.looks, config.requests_per_depth)
    click.echo(f"{run.directory.path}: the A/A's records", err=True)
    sys.exit(4 if found.void_reasons else 0)


def _progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
