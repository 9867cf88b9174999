"""`python -m kernarc.harness.selftest.conformance`: the suite's server for any client, in any language."""

import os
import sys
from pathlib import Path
from threading import Thread

import click

from .cases import CASES
from .pacing import be_punctual
from .server import Server


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--case", "case_name", default="steady-10ms", show_default=True, help="What to play at /v1/….")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=0, show_default=True, help="0 takes a free one and prints it.")
@click.option("--truth-log", type=click.Path(dir_okay=False, path_type=Path), help="Append one JSON line a stream.")
@click.option("--list", "lists", is_flag=True, help="Print every case and end.")
@click.option("--until-stdin-closes", is_flag=True, help="End with the process that started this one.")
def main(case_name: str, host: str, port: int, truth_log: Path | None, lists: bool, until_stdin_closes: bool) -> None:
    """Serve streams with exactly known token times.

    Any case is also at /CASE/v1/completions (or with the case as the model's name), so one server plays them all.
    GET /truth says when each token was written (CLOCK_MONOTONIC), GET /cases what a right client makes of each case.
    """
    if lists:
        for case in CASES.values():
            click.echo(f"{case.name:26} {'void' if case.void else 'ok  '} {case.says}")
        return
    if case_name not in CASES:
        raise click.UsageError(f"no case {case_name!r}; --list shows them all")
    be_punctual()
    server = Server(CASES[case_name], host, port, truth_log)
    if until_stdin_closes:
        Thread(target=_end_with_stdin, daemon=True).start()
    click.echo(f"ready http://{host}:{server.port}")
    sys.stdout.flush()
    server.serve_forever()


def _end_with_stdin() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main(prog_name="python -m kernarc.harness.selftest.conformance")
