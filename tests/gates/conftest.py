"""Stream records of known times and tokens, made up."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from kernarc.harness.run.records import (
    BuildRecord,
    RunManifest,
    StreamRecord,
    StreamStatus,
    TokenEvent,
    Usage,
)

from ..fakes.records import made_up_environment

MakeStream = Callable[..., StreamRecord]


def made_up_stream(
    build: str = "a",
    *,
    depth: int = 128,
    launch: int = 0,
    request: int = 0,
    step_ms: float = 10.0,
    tokens_per_step: int = 2,
    steps: int = 10,
    token_ids: tuple[int, ...] | None = None,
    status: StreamStatus = StreamStatus.OK,
    void_reason: str | None = None,
    events_are_steps: bool = True,
    block: int = 0,
    slot: int = 0,
    max_tokens: int | None = None,
    is_warmup: bool = False,
    finish_reason: str | None = "length",
) -> StreamRecord:
    """A stream whose TPOT is exactly step_ms / tokens_per_step: one token first, then `steps` equal events."""
    count = 1 + steps * tokens_per_step
    ids = token_ids if token_ids is not None else tuple(range(100, 100 + count))
    groups = [ids[:1], *(ids[start : start + tokens_per_step] for start in range(1, len(ids), tokens_per_step))]
    events = tuple(
        TokenEvent(t_ns=1_000_000_000 + round(index * step_ms * 1e6), token_ids=tuple(group))
        for index, group in enumerate(groups)
    )
    request_id = f"d{depth}-l{launch}-{'w' if is_warmup else 'r'}{request}"
    return StreamRecord(
        build=build,
        depth=depth,
        launch=launch,
        block=block,
        slot=slot,
        request_id=request_id,
        request_sha256=f"request {request_id}",
        prompt_ids_sha256=f"prompt {request_id}",
        is_warmup=is_warmup,
        max_tokens=len(ids) if max_tokens is None else max_tokens,
        sent_ns=900_000_000,
        connect_ns=0,
        ended_ns=events[-1].t_ns if events else 900_000_001,
        wall_utc="2026-11-30T12:00:00+00:00",
        events=events,
        events_are_steps=events_are_steps,
        usage=Usage(prompt_tokens=depth, completion_tokens=len(ids)),
        finish_reason=finish_reason,
        status=status,
        void_reason=void_reason,
    )


def started_second_takes(streams: Sequence[StreamRecord], factor: float) -> list[StreamRecord]:
    """The same streams of a and b, but whichever is started second in a launch takes `factor` times as long."""

    def stretched(stream: StreamRecord) -> StreamRecord:
        events = (event.model_copy(update={"t_ns": round(event.t_ns * factor)}) for event in stream.events)
        return stream.model_copy(update={"events": tuple(events)})

    return [stretched(stream) if stream.build == "ba"[stream.launch % 2] else stream for stream in streams]


@pytest.fixture
def make_stream() -> MakeStream:
    return made_up_stream


def made_up_run_manifest(builds: tuple[str, ...] = ("a", "b"), **changes: Any) -> RunManifest:
    return RunManifest(
        run_id="compare-1",
        kind="compare",
        created_utc="",
        config_name="default",
        config_yaml="",
        builds=tuple(
            BuildRecord(
                name=name,
                engine="kernarc",
                engine_version=None,
                command=(),
                model="",
                model_sha256=None,
                num_speculative_tokens=3,
            )
            for name in builds
        ),
        depths=(128, 256),
        requests_per_depth=4,
        max_tokens=21,
        seed=1,
        launches=5,
        residency="both",
        requests_sha256="",
        prompt_source="",
        environment=made_up_environment(),
        **changes,
    )


@pytest.fixture
def made_up_manifest() -> RunManifest:
    return made_up_run_manifest()
