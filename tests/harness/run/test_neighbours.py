"""A stream begins only once the other engines are idle."""

import subprocess
import sys
from functools import partial
from time import monotonic, sleep

from kernarc.harness.run.neighbours import LIMIT_S, Neighbours, busy_s, wait_until_idle

SPIN_S = 0.4
SPINS_THEN_SLEEPS = f"""
import threading, time
def spin():
    end = time.monotonic() + {SPIN_S}
    while time.monotonic() < end: pass
thread = threading.Thread(target=spin)
thread.start()
print("spinning", flush=True)
thread.join()
print("idle", flush=True)
time.sleep(60)
"""


def test_waits_for_a_thread_that_spins_after_its_work() -> None:
    with subprocess.Popen([sys.executable, "-c", SPINS_THEN_SLEEPS], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        try:
            assert engine.stdout.readline() == "spinning\n"
            used_s = partial(busy_s, [engine.pid])
            assert wait_until_idle(used_s, limit_s=30)
            assert engine.stdout.readline() == "idle\n"  # it had ended its spin
        finally:
            engine.kill()


SLEEPS_THEN_SPINS = f"""
import sys, time
sys.stdin.readline()
end = time.monotonic() + {SPIN_S}
while time.monotonic() < end: pass
print("spun", flush=True)
time.sleep(60)
"""


def test_names_a_neighbour_that_goes_to_work_while_a_stream_runs_and_no_other() -> None:
    """It rests while it is waited for, and works only then: what it did before or after the stream is not asked."""
    command = [sys.executable, "-c", SLEEPS_THEN_SPINS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        try:
            resting = subprocess.Popen(["sleep", "60"])
            neighbours = Neighbours({"spins": [engine.pid], "rests": [resting.pid], "endpoint": []}).wait(limit_s=30)
            engine.stdin.write("go\n")
            engine.stdin.flush()
            assert engine.stdout.readline() == "spun\n"
            assert neighbours.busy() == ("spins",)
            again = Neighbours({"spins": [engine.pid], "rests": [resting.pid]}).wait(limit_s=30)
            sleep(0.1)
            assert again.busy() == ()
        finally:
            engine.kill()
            resting.kill()


def test_gives_up_on_an_engine_that_is_never_idle() -> None:
    start = monotonic()
    assert not wait_until_idle(monotonic, limit_s=0.1)
    assert 0.1 <= monotonic() - start < LIMIT_S + 1


def test_an_idle_or_vanished_engine_costs_one_look() -> None:
    looks = []
    assert wait_until_idle(lambda: float(len(looks.append(0) or looks) > 99))  # type: ignore[func-returns-value]
    assert len(looks) == 2
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert busy_s([gone.pid]) == 0
