"""`kernarc-gate bench`: measure builds side by side, draw the table."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from ...harness.errors import ConfigError, KernarcError


def comma_list(_: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """ "a,b" to ("a", "b")."""
    if value is None:
        return None
    items = tuple(item.strip() for item in value.split(",") if item.strip())
    if not items:
        raise click.BadParameter("expected names separated by commas", param=parameter)
    return items


def depth_list(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """ "8192,128" to (128, 8192)."""
    numbers = number_list(context, parameter, value)
    return None if numbers is None else tuple(sorted(set(numbers)))


def number_list(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """ "3,5" to (3, 5)."""
    items = comma_list(context, parameter, value)
    if items is None:
        return None
    try:
        return tuple(int(item) for item in items)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of whole numbers, as in 128,8192", param=parameter) from None


@click.command()
@click.option("--config", "config_name", metavar="NAME|PATH", help="A bench. [default: default]")
@click.option(
    "--builds", callback=comma_list, metavar="A,B", help="Baseline first: names, files, endpoint:URL, git:REF."
)
@click.option("--depths", callback=depth_list, metavar="N,N", help="Context depths in tokens.")
@click.option("--requests", type=int, metavar="N", help="Requests at each depth in each launch.")
@click.option("--max-tokens", type=int, metavar="N", help="Output tokens of each request.")
@click.option("--launches", type=int, metavar="N", help="Fresh launches of every engine.")
@click.option("--model", "model_path", metavar="DIR|NAME", help="Checkpoint for builds that name none.")
@click.option("--seed", type=int, metavar="N", help="Other prompts, another order.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Run directory. [default: runs/RUN_ID]")
@click.option("--resume", type=click.Path(path_type=Path), metavar="RUN_DIR", help="Complete an interrupted run.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def bench(
    config_name: str | None,
    builds: tuple[str, ...] | None,
    out: Path | None,
    resume: Path | None,
    model_path: str | None,
    as_json: bool,
    **changes: Any,
) -> None:
    """Measure builds side by side at several context depths.

    Without any option: the bundled decoder against stock vLLM where it is installed, on a small checkpoint that is made
    once. Leaves table.md, table.csv, table.json, speed.svg, speed.png and index.html in the run directory; exit code 4
    where a cell has no speed.
    """
    from ...harness.run.completeness import how_to_continue
    from ...harness.run.interrupts import sigterm_as_interrupt
    from ...harness.run.progress import ProgressDisplay
    from ...harness.run.run import Run

    with ProgressDisplay() as display, sigterm_as_interrupt():
        if resume is not None:
            _refuse_with_resume(config_name, builds, out, model_path, changes)
            run = Run.resume(resume, display)
            if run.plan.kind != "bench":
                raise ConfigError(f"{resume} is a {run.plan.kind} run", how_to_continue(run.plan.kind, resume))
        else:
            prepared = _prepare(config_name or "default", builds, model_path, changes)
            if prepared.remark:
                display.notify(prepared.remark)
            run = Run.create(prepared.plan, out, display)
        display.begin(run)
        try:
            run.measure()
        except (KernarcError, KeyboardInterrupt) as error:
            display.notify(_how_to_resume(run))
            if isinstance(error, KeyboardInterrupt):
                sys.exit(130)
            raise
    sys.exit(_report(run.directory.path, as_json))


def _prepare(config_name: str, builds: tuple[str, ...] | None, model_path: str | None, changes: dict[str, Any]) -> Any:
    from ...harness.config.models import BenchConfig
    from ...harness.config.yaml_files import load, override
    from ...harness.run.plan import bench_plan

    flags = {"requests_per_depth": changes.pop("requests"), **changes}
    if model_path is not None:
        flags["model"] = {"path": model_path}
    return bench_plan(config_name, override(load(config_name, BenchConfig), flags), builds)


def _refuse_with_resume(*given: Any) -> None:
    values = [value for item in given for value in (item.values() if isinstance(item, dict) else [item])]
    if any(value is not None for value in values):
        raise click.UsageError("--resume takes everything from the run; give it no other option but --json")


def _how_to_resume(run: Any) -> str:
    done = sum(not stream.is_warmup for stream in run.directory.streams())
    total = sum(len(run.schedule(launch)) for launch in range(run.plan.launches))
    path = run.directory.path
    return f"{done} of {total} streams are kept; continue with `kernarc-gate bench --resume {path}`"


def _report(run_dir: Path, as_json: bool) -> int:
    """Writes table and chart, prints the result; the exit code."""
    from ...harness.run.agreement import id_agreement
    from ..render import Publication, render_table_text

    publication = Publication.of([run_dir], require_check=False)
    paths = publication.write(run_dir)
    (saved,), table = publication.runs, publication.table
    is_void = any(cell.void_reason is not None for cell in table.cells.values())
    if as_json:
        click.echo(json.dumps({"run_dir": str(run_dir), "cells": _cells(table)}))
    else:
        click.echo(render_table_text(table, shutil.get_terminal_size((120, 40)).columns, colour=sys.stdout.isatty()))
        baseline, *candidates = [build.name for build in saved.manifest.builds]
        for candidate in candidates:
            click.echo(id_agreement(saved.streams, baseline, candidate).sentence())
        click.echo(f"{run_dir}: {', '.join(path.name for path in paths)}", err=True)
    return 4 if is_void else 0


def _cells(table: Any) -> list[dict[str, Any]]:
    """The contract of `bench --json`; a void cell has null speeds."""
    return [
        {
            "build": cell.column.build.name,
            "depth": cell.depth,
            "tpot_ms": cell.tpot_ms,
            "step_ms": cell.step_ms,
            "tokens_per_step": cell.tokens_per_step,
            "ttft_ms": cell.ttft_ms,
            "streams": cell.streams,
            "void_streams": cell.void_streams,
            "void_reasons": list(cell.void_reasons),
        }
        for cell in table.cells.values()
    ]
