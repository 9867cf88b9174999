"""Commands about this machine: engines, doctor, selftest."""

import json
import sys
from pathlib import Path
from typing import Any

import click

ENGINE_NAMES = click.Choice(["kernarc", "vllm"])
JSON_FLAG = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")


@click.group()
def engines() -> None:
    """Install and check engines, each in its own environment."""


@engines.command("list")
@JSON_FLAG
def engines_list(as_json: bool) -> None:
    """Which engines are installed, and where."""
    from ...harness.engines.check import engine_states

    states = engine_states()
    if as_json:
        rows = [{"engine": s.engine, "version": s.version, "where": s.where, "hint": s.hint} for s in states]
        click.echo(json.dumps({"engines": rows}))
        return
    for state in states:
        what = f"{state.version}  {state.where}" if state.is_installed else f"not installed: {state.hint}"
        click.echo(f"{state.engine:8} {what}")


@engines.command("install")
@click.argument("engine", type=click.Choice(["vllm"]))
@click.option("--no-check", is_flag=True, help="Do not start it afterwards.")
@JSON_FLAG
def engines_install(engine: str, no_check: bool, as_json: bool) -> None:
    """Put stock vLLM 0.31.0 into an environment of its own, and check that it serves.

    Without a GPU this is its CPU distribution: 3.5 GB, about 3 minutes, and a minute more for the check.
    """
    from ...harness.engines.vllm_install import install
    from ...harness.run.interrupts import sigterm_as_interrupt

    with _Line() as line, sigterm_as_interrupt():
        installation = install(line.keep, line.show)
    click.echo(f"{installation.distribution} {installation.version} is in {installation.folder}", err=True)
    result: dict[str, Any] = {"engine": engine, "version": installation.version, "where": str(installation.folder)}
    if not no_check:
        result |= _checked(engine)
    _finish(result, as_json, f"{engine} {installation.version} is ready to use")


@engines.command("check")
@click.argument("names", metavar="[ENGINE]...", nargs=-1, type=ENGINE_NAMES)
@JSON_FLAG
def engines_check(names: tuple[str, ...], as_json: bool) -> None:
    """Start each installed engine on the tiny checkpoint and ask it for one answer."""
    from ...harness.engines.check import engine_states
    from ...harness.errors import EngineError
    from ...harness.run.interrupts import sigterm_as_interrupt

    rows: list[dict[str, Any]] = []
    for state in engine_states():
        if names and state.engine not in names:
            continue
        row: dict[str, Any] = {"engine": state.engine, "version": state.version, "where": state.where, "works": None}
        if state.is_installed:
            try:
                with sigterm_as_interrupt():
                    row |= _checked(state.engine)
            except EngineError as error:
                row |= {"works": False, "problem": str(error)}
        elif state.engine in names:
            row |= {"works": False, "problem": f"not installed: {state.hint}"}
        rows.append(row)
        if not as_json:
            click.echo(_check_line(row, state.hint))
    if as_json:
        click.echo(json.dumps({"engines": rows}))
    sys.exit(4 if any(row["works"] is False for row in rows) else 0)


def _check_line(row: dict[str, Any], hint: str | None) -> str:
    if row["works"] is None:
        return f"{row['engine']:8} not installed: {hint}"
    if row["works"]:
        return f"{row['engine']:8} {row['version']} works: ready after {row['ready_s']:.0f} s, {row['where']}"
    return f"{row['engine']:8} does not work: {row['problem']}"


def _checked(engine: str) -> dict[str, Any]:
    from ...harness.engines.check import check_engine

    with _Line() as line:
        check = check_engine(
            engine, line.show, lambda seconds, last: line.show(f"starting {engine}, {seconds:.0f} s  {last}")
        )
    return {"works": True, "ready_s": check.ready_s, "token_ids": list(check.token_ids)}


@click.command()
@click.option(
    "--model", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Does this checkpoint fit?"
)
@JSON_FLAG
def doctor(model: Path | None, as_json: bool) -> None:
    """What this machine can and cannot do, and the next step for each."""
    from ...decoder.commands import cpu_path
    from ...harness.doctor import Finding, State, examine

    findings = list(examine(model))
    is_native, path = cpu_path()
    step = "" if is_native else "install g++, and leave KERNARC_CPU_PATH unset"
    findings.append(Finding("decoder on the CPU", State.FINE if is_native else State.NOTE, path, step))
    if as_json:
        rows = [{"name": f.name, "state": f.state, "detail": f.detail, "next_step": f.next_step} for f in findings]
        click.echo(json.dumps({"findings": rows}))
    else:
        for finding in findings:
            click.echo(f"{finding.state:5} {finding.name}: {finding.detail}")
            if finding.next_step:
                click.echo(f"      → {finding.next_step}")
    sys.exit(4 if any(finding.state is State.BAD for finding in findings) else 0)


@click.command()
@click.option("--case", "cases", multiple=True, metavar="NAME", help="Only these cases; may be given several times.")
@click.option("--list", "lists", is_flag=True, help="Print the cases and end.")
@click.option("--process-stamps", is_flag=True, help="Do without the kernel's stamps: what waking up late would cost.")
@JSON_FLAG
def selftest(cases: tuple[str, ...], lists: bool, process_stamps: bool, as_json: bool) -> None:
    """Measure this machine's client against a server of known speed, on every fault that benchmarks have fallen for.

    Prints truth, measured and verdict of each case, then how late the client's own time stamps are. Takes about a
    minute; exit code 0, or 4 where this client on this machine is not to be believed.
    """
    from ...harness.client.timestamps import StampedBy
    from ...harness.selftest.selftest import default_cases, run_selftest, seconds_to_play
    from ...harness.selftest.table import case_list, lines

    if lists:
        click.echo("\n".join(case_list()))
        return
    left = list(cases) or default_cases()
    with _Line() as line:

        def show(played: str) -> None:
            left.remove(played)
            line.show(f"played {played}, about {seconds_to_play(left):.0f} s left")

        stamped_by = StampedBy.PROCESS if process_stamps else StampedBy.KERNEL
        report = run_selftest(cases, lambda row: show(row.case), stamped_by)
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        for text in lines(report):
            click.echo(text)
    sys.exit(report.exit_code)


def _finish(result: dict[str, Any], as_json: bool, sentence: str) -> None:
    click.echo(json.dumps(result) if as_json else sentence)


class _Line:
    """One line on a terminal's standard error that is written over and over; on anything else, nothing."""

    def __init__(self) -> None:
        self._visible = sys.stderr.isatty()

    def __enter__(self) -> "_Line":
        return self

    def __exit__(self, *_: object) -> None:
        if self._visible:
            click.echo("\r\x1b[K", nl=False, err=True)

    def keep(self, text: str) -> None:
        """A line of its own, on anything."""
        click.echo(f"\r\x1b[K{text}" if self._visible else text, err=True)

    def show(self, text: str) -> None:
        """Replaces the line."""
        if self._visible:
            click.echo(f"\r\x1b[K{text[:110]}", nl=False, err=True)
