"""Made-up measurements of two builds, and what the gate makes of them."""

from typing import Any

import numpy as np
from kernarc.gates.compare import Measured, evaluate
from kernarc.gates.config import GateConfig
from kernarc.gates.outcomes import GateOutcome, OutputOutcome, Verdict
from kernarc.gates.words import with_words
from kernarc.harness.run.records import StreamRecord

from ..gates.conftest import MakeStream, made_up_run_manifest

CONFIG = GateConfig(depths=(128, 256), looks=(5,), n_resamples=1000)


def checked(build: str, verdict: Verdict = Verdict.PASS, reason: str = "fine") -> OutputOutcome:
    return OutputOutcome(build=build, verdict=verdict, reason=reason, positions=10, matches=10, worst_gap=0.0)


PASSED = (checked("a"), checked("b"))


def measured(
    make_stream: MakeStream, effect: float = 0.0, *, launches: int = 5, noise: float = 0.003, tokens: int = 2
) -> list[StreamRecord]:
    """Both builds with noise; the candidate's steps take (1 + effect) times as long, `tokens` a step."""
    rng = np.random.default_rng(0)
    streams = []
    for depth in (128, 256):
        for launch in range(launches):
            for request in range(4):
                place = {"depth": depth, "launch": launch, "request": request, "block": request // 2}
                slow = 10 * (1 + effect) * np.exp(noise * rng.normal())
                streams.append(make_stream("a", step_ms=10 * np.exp(noise * rng.normal()), **place))
                streams.append(make_stream("b", step_ms=slow, tokens_per_step=tokens, steps=20 // tokens, **place))
    return streams


def outcome(streams: list[StreamRecord], checks: tuple[OutputOutcome, ...] = PASSED, **changes: Any) -> GateOutcome:
    launches = changes.pop("launches", 5)
    config = changes.pop("config", CONFIG)
    run = Measured(changes.pop("manifest", made_up_run_manifest()), streams, launches)
    return with_words(evaluate(run, config, checks, **changes))
