"""One launch: engines start, warm up, answer their share of the schedule, and end."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..client.chat_prompt import fit_chat_prompt
from ..client.client import CompletionRequest, StreamingClient, StreamOutcome
from ..client.text_tokenizer import load_text_tokenizer
from ..client.token_counts import TextTokenizer
from ..config.builds import Build
from ..config.checkpoints import Checkpoint
from ..config.models import MeasurementConfig
from ..engines.base import RunningEngine, cache_hits, verify_steps
from ..engines.endpoint import api_key, connect
from ..engines.registry import engine_of
from ..environment import sample, void_reason
from ..errors import EngineError
from ..gpu import Gpu
from .neighbours import Neighbours
from .plan import RunPlan
from .progress import RunObserver
from .records import EnvironmentSample, LaunchRecord, StreamRecord, StreamStatus
from .requests import prompt_sha256, request_sha256
from .schedule import Slot, launch_order, warmup_schedule
from .storage import Request, RunDirectory, StorageError

WARMUP_BLOCK = -1


@dataclass
class _Arm:
    """One build while it runs."""

    build: Build
    engine: RunningEngine
    client: StreamingClient
    tokenizer: TextTokenizer | None
    counters_before: dict[str, float] = field(default_factory=dict)  # of the first measured stream
    counters: dict[str, float] = field(default_factory=dict)  # as last read
    samples: list[EnvironmentSample] = field(default_factory=list)
    crowded_streams: int = 0  # measured while another engine was at work


class Launch:
    """Measures slots of one launch with all their builds resident at once."""

    def __init__(
        self,
        plan: RunPlan,
        directory: RunDirectory,
        checkpoints: Mapping[str, Checkpoint],
        gpu: Gpu | None,
        observer: RunObserver,
    ) -> None:
        self._plan = plan
        self._directory = directory
        self._checkpoints = checkpoints
        self._gpu = gpu
        self._observer = observer

    def measure(
        self,
        launch: int,
        slots: Sequence[Slot],
        requests: Mapping[str, Request],
    ) -> None:
        """Appends a stream for every slot, in order. Every engine is stopped however this ends.

        EngineError where an engine does not start or dies; the stream it left unfinished is set aside, not counted.
        """
        arms: dict[str, _Arm] = {}
        with ExitStack() as stack:
            try:
                for name in launch_order([build.name for build in self._plan.builds], launch):
                    if any(slot.build == name for slot in slots):
                        arms[name] = self._start(name, launch, stack)
                self._warm_up(arms, launch, slots, requests)
                for slot in slots:
                    neighbours = self._wait_for_others(arms, slot.build)
                    self._observer.stream_begins(slot, launch)
                    record = self._measure_slot(arms[slot.build], slot, launch, requests[slot.request_id])
                    busy = neighbours.busy()
                    arms[slot.build].crowded_streams += bool(busy)
                    record = record.model_copy(update={"busy_neighbours": busy})
                    self._directory.append(record)
                    self._observer.stream_done(record)
            except BaseException:
                with suppress(StorageError):  # a full disk must not hide what went wrong
                    self._record(arms.values(), launch)
                raise
            self._record(arms.values(), launch)

    def _start(self, name: str, launch: int, stack: ExitStack) -> _Arm:
        build = next(build for build in self._plan.builds if build.name == name)
        checkpoint = self._checkpoints.get(name)
        limits = self._plan.measurement.limits
        if checkpoint is None:
            engine = connect(build)
        else:
            log_path = self._log_path(name, launch)
            engine = engine_of(build, self._plan.max_context).start(
                checkpoint.path,
                log_path,
                limits,
                lambda elapsed_s, line: self._observer.engine_starting(name, launch, elapsed_s, line),
            )
        stack.callback(engine.stop)
        self._observer.engine_ready(name, launch, engine.ready_s)
        tokenizer_json = checkpoint.tokenizer_json if checkpoint else build.config.tokenizer_json
        tokenizer = load_text_tokenizer(tokenizer_json) if tokenizer_json else None
        client = StreamingClient(engine.base_url, limits, tokenizer=tokenizer, api_key=api_key(build))
        stack.callback(client.close)
        return _Arm(build, engine, client, tokenizer, counters=engine.counters())

    def _log_path(self, name: str, launch: int) -> Path:
        safe_name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)
        return self._directory.logs_path / f"{safe_name}-l{launch}.log"

    def _warm_up(
        self, arms: Mapping[str, _Arm], launch: int, slots: Sequence[Slot], requests: Mapping[str, Request]
    ) -> None:
        """Every build answers the warm-ups of its depths, in turns; arms: in start order."""
        depths = {(slot.build, slot.depth) for slot in slots}
        warmups = [(request.depth, name) for name, request in requests.items() if request.is_warmup]
        for slot in warmup_schedule(list(arms), warmups, WARMUP_BLOCK):
            if (slot.build, slot.depth) in depths:
                self._observer.warming_up(slot.build, launch, slot.depth)
                request = requests[slot.request_id]
                self._wait_for_others(arms, slot.build)
                self._directory.append(self._measure_slot(arms[slot.build], slot, launch, request))
        for arm in arms.values():
            arm.counters_before = arm.counters

    def _wait_for_others(self, arms: Mapping[str, _Arm], name: str) -> Neighbours:
        processes = {other: arm.engine.process for other, arm in arms.items() if other != name}
        others = {other: process.pids() for other, process in processes.items() if process is not None}
        return Neighbours(others).wait()

    def _measure_slot(self, arm: _Arm, slot: Slot, launch: int, request: Request) -> StreamRecord:
        completion = self._completion(arm, request)
        before = sample(self._gpu)
        outcome = arm.client.complete(completion)
        after = sample(self._gpu)
        arm.samples += [before, after]
        counters_before, arm.counters = arm.counters, arm.engine.counters()
        rules = self._plan.measurement.void_rules
        reason = (
            outcome.void_reason
            or self._length_problem(outcome)
            or _cache_problem(counters_before, arm.counters)
            or void_reason([before, after], rules)
        )
        steps = verify_steps(counters_before, arm.counters)
        is_merged = steps is not None and steps > len(outcome.events) - 1  # the server sent some steps as one event
        record = _stream_record(arm.build, slot, launch, request, outcome, reason, self._plan.measurement)
        if is_merged:
            record = record.model_copy(update={"events_are_steps": False})
        if reason is not None:
            self._raise_if_dead(arm, record)
        return record

    def _completion(self, arm: _Arm, request: Request) -> CompletionRequest:
        """The prompt as ids; for a chat endpoint as text that its template makes exactly as long."""
        drafts = arm.build.num_speculative_tokens
        completion = CompletionRequest(
            prompt_ids=request.prompt_ids,
            max_tokens=self._plan.measurement.max_tokens,
            model=arm.engine.model_name,
            max_tokens_per_step=None if drafts is None else drafts + 1,
            void_on_repetition=self._plan.measurement.void_rules.repetition_loop == "void",
        )
        if arm.build.config.api == "completions" or arm.tokenizer is None:
            return completion
        text = arm.tokenizer.decode(request.prompt_ids)
        messages = fit_chat_prompt(arm.client, arm.engine.model_name, text, request.depth)
        return replace(completion, prompt_ids=(), messages=messages, prompt_tokens=request.depth)

    def _length_problem(self, outcome: StreamOutcome) -> str | None:
        """Answers of different lengths are different work."""
        if self._plan.measurement.void_rules.early_stop == "note":
            return None
        count, wanted = sum(event.num_tokens for event in outcome.events), self._plan.measurement.max_tokens
        return None if count == wanted else f"{count} tokens came where {wanted} were asked for with ignore_eos"

    def _raise_if_dead(self, arm: _Arm, record: StreamRecord) -> None:
        try:
            arm.engine.raise_if_dead(f"while answering {record.request_id}")
        except EngineError as error:
            self._directory.set_aside(record.model_dump_json(), error.message)
            raise

    def _record(self, arms: Iterable[_Arm], launch: int) -> None:
        """One LaunchRecord for every build that was ready."""
        records = [
            LaunchRecord(
                build=arm.build.name,
                launch=launch,
                ready_s=arm.engine.ready_s,
                samples=tuple(arm.samples),
                server_counters_before=arm.counters_before,
                server_counters_after=arm.counters,
                void_reason=_cache_problem(arm.counters_before, arm.counters),
                crowded_streams=arm.crowded_streams,
            )
            for arm in arms
        ]
        existing = self._directory.manifest().launch_records
        self._directory.update_manifest(launch_records=(*existing, *records))


def _cache_problem(before: Mapping[str, float], after: Mapping[str, float]) -> str | None:
    hits = cache_hits(before, after)
    return None if hits == 0 else f"the server's counters show {hits:g} prompt tokens taken from its cache"


def _stream_record(
    build: Build,
    slot: Slot,
    launch: int,
    request: Request,
    outcome: StreamOutcome,
    reason: str | None,
    measurement: MeasurementConfig,
) -> StreamRecord:
    stated = build.config.events_are_steps
    return StreamRecord(
        build=build.name,
        depth=request.depth,
        launch=launch,
        block=slot.block,
        slot=slot.order,
        request_id=request.request_id,
        request_sha256=request_sha256(request.prompt_ids, measurement.max_tokens),
        prompt_ids_sha256=prompt_sha256(request.prompt_ids),
        is_warmup=request.is_warmup,
        max_tokens=measurement.max_tokens,
        sent_ns=outcome.sent_ns,
        stamped_by=outcome.stamped_by,
        connect_ns=outcome.connect_ns,
        ended_ns=outcome.ended_ns,
        wall_utc=outcome.wall_utc,
        events=outcome.events,
        events_are_steps=outcome.events_are_steps and stated is not False,
        usage=outcome.usage,
        finish_reason=outcome.finish_reason,
        status=StreamStatus.OK if reason is None else StreamStatus.VOID,
        void_reason=reason,
    )
