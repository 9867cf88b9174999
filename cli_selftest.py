"""`kernarc-gate selftest`: may this machine's client be believed?"""

import json
import sys

import click


@click.command()
@click.option("--case", "names", multiple=True, metavar="NAME", help="Only this case; may be given several times.")
@click.option("--list", "lists", is_flag=True, help="Print the cases and end.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def selftest(names: tuple[str, ...], lists: bool, as_json: bool) -> None:
    """Measure this machine's client against a server of known speed.

    Plays every fault of streaming servers that is known to have fooled a measuring client, prints truth, measured and
    verdict of each, then how late the client's own time stamps are. Takes about a minute; exit code 0 or 4.
    """
    from .harness.conformance.cases import CASES
    from .harness.selftest import default_cases, run_selftest
    from .harness.selftest_rows import CaseRow, TimingRow
    from .harness.selftest_table import lines

    if lists:
        for case in CASES.values():
            click.echo(f"{case.name:26} {case.says}")
        return
    total = len(names or default_cases())
    done = 0

    def show(row: CaseRow | TimingRow) -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{done} of {total}: {row.case}", nl=False, err=True)

    report = run_selftest(names, show)
    if sys.stderr.isatty():
        click.echo("\r\x1b[K", nl=False, err=True)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2, allow_nan=False))
    else:
        click.echo("\n".join(lines(report)))
    sys.exit(report.exit_code)
