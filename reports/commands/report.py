"""`kernarc-gate report` and `history`: tables, charts and the page, from saved records alone."""

import json
import sys
from pathlib import Path
from typing import Any

import click

RUN_DIRECTORY = click.Path(path_type=Path)


@click.command()
@click.argument("run_dirs", metavar="RUN_DIR...", nargs=-1, required=True, type=RUN_DIRECTORY)
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Where to write. [default: the run itself]")
@click.option(
    "--against", multiple=True, type=RUN_DIRECTORY, metavar="RUN_DIR", help="A former publication: show what moved."
)
@click.option("--revision", metavar="LETTER", help="Of the title block. [default: A, with --against B]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def report(
    run_dirs: tuple[Path, ...], out: Path | None, against: tuple[Path, ...], revision: str | None, as_json: bool
) -> None:
    """Render table, chart and page from saved records alone.

    Writes table.md, table.csv, table.json, speed.svg, speed.png and index.html. The first run's first build is the
    baseline. A speed is shown only where the output check passed (`kernarc-gate check RUN_DIR`). The same records give
    the same bytes. Exit code 4 where no cell has a speed.
    """
    from ..frames import screen
    from ..render import Publication, render_movement_text, render_table_text
    from ..titleblock import drawing_number

    if out is None and len(run_dirs) > 1:
        raise click.UsageError("several runs have no folder in common: say where to write with --out DIR")
    publication = Publication.of(run_dirs, against=against)
    folder = out or run_dirs[0]
    paths = publication.write(folder, revision_letter=revision)
    if as_json:
        click.echo(json.dumps(_document(publication, folder, paths, drawing_number(publication.runs))))
    else:
        width, colour = screen()
        click.echo(render_table_text(publication.table, width, colour=colour), nl=False)
        if publication.revision is not None:
            click.echo(render_movement_text(publication.revision, width, colour=colour), nl=False)
    click.echo(f"{folder}: {', '.join(path.name for path in paths)}", err=True)
    for run in publication.runs:
        if run.why_unfinished is not None:
            click.echo(f"{run.path} is unfinished: {run.why_unfinished}", err=True)
    if all(cell.tpot is None for cell in publication.table.cells.values()):
        click.echo("no cell has a speed to publish; the table says why", err=True)
        sys.exit(4)


@click.command()
@click.argument("folder", default="runs", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Also write history.{md,csv,json,svg,png}.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def history(folder: Path, out: Path | None, as_json: bool) -> None:
    """List the runs of a folder, oldest first: build, commit, date, depth, ms per token.

    Reads the records themselves; there is no database. FOLDER is searched with everything below it. [default: runs]
    """
    from ..frames import screen
    from ..history import document, read_history
    from ..render import render_history_text, write_history

    found = read_history(folder)
    if out is not None:
        paths = write_history(found, out)
        click.echo(f"{out}: {', '.join(path.name for path in paths)}", err=True)
    if as_json:
        click.echo(json.dumps(document(found), sort_keys=True))
    else:
        width, colour = screen()
        click.echo(render_history_text(found, width, colour=colour), nl=False)


def _document(publication: Any, folder: Path, paths: list[Path], number: str) -> dict[str, Any]:
    """The contract of `report --json`."""
    from ..movement import documents
    from ..table_files import rows

    return {
        "out": str(folder),
        "files": [path.name for path in paths],
        "drawing_number": number,
        "cells": rows(publication.table),
        "moved": None if publication.revision is None else documents(publication.revision),
    }
