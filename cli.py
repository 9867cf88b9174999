"""The `kernarc-gate` command: parse, call, print, exit code. Commands load on use, so that --help stays fast."""

import importlib
import os
import sys
import traceback

import click

FAILED = 4  # exit code

# command → module that defines a click command of that name, and its line in --help
COMMANDS = {
    "bench": ("reports.commands.bench", "Measure builds side by side at several context depths."),
    "compare": ("reports.commands.gate", "Gate a candidate against a baseline: interval, output check, verdict."),
    "check": ("reports.commands.gate", "Check every output token of a finished run against the reference."),
    "report": ("reports.commands.report", "Render table, chart and page from saved records."),
    "history": ("reports.commands.report", "List the runs of a folder and how speed moved."),
    "calibrate": ("reports.commands.calibrate", "False alarms, coverage and the smallest effect the gate can see."),
    "selftest": ("reports.commands.machine", "Measure this machine's client against a server of known speed."),
    "serve": ("decoder.commands", "Serve a checkpoint with the bundled decoder."),
    "generate": ("decoder.commands", "Continue a prompt with the bundled decoder."),
    "model": ("decoder.commands", "Make, inspect and quantise checkpoints."),
    "engines": ("reports.commands.machine", "Install and check engines, each in its own environment."),
    "config": ("reports.commands.config", "Show or check a configuration."),
    "doctor": ("reports.commands.machine", "What this machine can and cannot do, and the next step."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they run; --help imports none."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f".{COMMANDS[cmd_name][0]}", __package__)
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="kernarc-gate")
def cli() -> None:
    """Is this decoder build faster, by how much, at every context depth, and are its answers still right?"""


def main() -> None:
    """Entry point: expected errors become a message, a hint and their exit code.

    What nobody foresaw is 4, as a void measurement is: Python's own 1 would say that the candidate is slower or wrong.
    """
    from .decoder.errors import DecoderError
    from .harness.errors import KernarcError

    try:
        cli(prog_name="kernarc-gate", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except (DecoderError, KernarcError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(getattr(error, "exit_code", 2))
    except BrokenPipeError:  # the reader of our output has gone, and wants no message
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except OSError as error:  # a full disk, a file that cannot be read
        click.echo(f"error: {error}", err=True)
        click.echo("  this is no verdict; measured streams are kept in the run's folder", err=True)
        sys.exit(FAILED)
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        click.echo(f"error: unexpected {type(error).__name__}: {error}", err=True)
        click.echo("  this is a fault of kernarc-gate and no verdict; please report the lines above", err=True)
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
