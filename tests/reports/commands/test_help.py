"""Help is there at once."""

import subprocess
import sys


def test_help_needs_no_pytorch() -> None:
    script = "import sys; from click.testing import CliRunner; from kernarc.cli import cli\n"
    script += "result = CliRunner().invoke(cli, ['serve', '--help']); print(result.output, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
    assert "Test plants, for tests of the gate only" in done.stdout
