"""What a run leaves on disk: raw times and tokens, units in every name, rounding never.

A run is a directory holding `manifest.json` (RunManifest) and `streams.jsonl` (one StreamRecord a line, in the order
the streams finished). Metrics are computed from these by `metrics.py`, never stored.
"""

from enum import StrEnum

from pydantic import BaseModel, ConfigDict

SCHEMA_VERSION = 1


class Record(BaseModel):
    """Frozen, strict and closed: a misspelt or missing field is an error, not a default."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class TokenEvent(Record):
    """One streamed event that carried tokens.

    t_ns: time.perf_counter_ns() when the bytes that completed the event arrived, before parsing, by the kernel's stamp
    of their segment or, where there is none, by the process's clock right after the read.
    token_ids: the ids it carried; empty where the server sends none. text: its text, "" where the server sends none.
    counted_tokens: where there are no ids, how many tokens it carried by the server's own exact count, at least one.
    """

    t_ns: int
    token_ids: tuple[int, ...]
    text: str = ""
    counted_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """How many tokens the event carried."""
        return len(self.token_ids) if self.counted_tokens is None else self.counted_tokens


class Usage(Record):
    """The server's own counts; None where it did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class StreamStatus(StrEnum):
    """A stream either counts or says why it does not."""

    OK = "ok"
    VOID = "void"


class StreamRecord(Record):
    """One request sent to one build, and everything that came back."""

    schema_version: int = SCHEMA_VERSION
    build: str
    depth: int  # prompt length in tokens
    launch: int  # which launch of the engine, from 0
    block: int  # which ABBA block of the launch, from 0
    slot: int  # the order in which it ran within the launch, from 0
    request_id: str  # the same for every build: "d1024-l0-r3"
    request_sha256: str  # of the prompt ids and sampling parameters
    prompt_ids_sha256: str
    is_warmup: bool = False
    max_tokens: int
    sent_ns: int  # perf_counter_ns when the request's last byte left, by the same clock as the events
    stamped_by: str | None = None  # kernel or process; None in records from before there was a choice
    connect_ns: int  # time to connect before that, 0 on a kept connection
    ended_ns: int  # when the stream closed or was given up
    wall_utc: str  # ISO 8601, when it was sent
    events: tuple[TokenEvent, ...]
    events_are_steps: bool  # one event is one engine step, so step_ms and tokens_per_step mean something
    usage: Usage
    finish_reason: str | None
    status: StreamStatus
    void_reason: str | None = None
    busy_neighbours: tuple[str, ...] = ()  # resident builds whose engine used the processor as it began or ran

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every emitted id in order."""
        return tuple(token for event in self.events for token in event.token_ids)

    @property
    def text(self) -> str:
        """The whole streamed text."""
        return "".join(event.text for event in self.events)


class BuildRecord(Record):
    """What was measured, precisely enough to measure it again."""

    name: str
    engine: str  # kernarc, vllm, endpoint
    engine_version: str | None
    command: tuple[str, ...]  # as launched; empty for an endpoint
    model: str
    model_sha256: str | None
    num_speculative_tokens: int | None
    draft_vocab_size: int | None = None  # tokens that may be drafted, of vocab_size; None: all of them
    draft_vocab_sha256: str | None = None  # of its file; None also in records from before it was written down
    vocab_size: int | None = None  # known where draft_vocab_size is
    library_versions: dict[str, str] = {}  # where the engine has an environment of its own
    environment: dict[str, str] = {}  # that the build sets
    structured_acceptance: float | None = None  # what structured weights were made for; None: others
    git_commit: str | None = None  # of the code that the build runs; None where nobody can say
    git_dirty: bool | None = None
    sources_sha256: str | None = None  # of that code; None where nobody can say, or said so at the time


class EnvironmentSample(Record):
    """The machine at one moment of a launch; GPU fields are None without NVML."""

    t_ns: int
    cpu_load_1min: float
    memory_available_bytes: int
    gpu_sm_clock_mhz: int | None = None
    gpu_memory_clock_mhz: int | None = None
    gpu_temperature_c: int | None = None
    gpu_power_w: float | None = None
    gpu_throttle_reasons: tuple[str, ...] = ()
    gpu_foreign_processes: tuple[str, ...] = ()


class Environment(Record):
    """The machine and the software a run was made on; must-match keys decide whether two runs may be compared."""

    hostname: str
    platform: str
    cpu_model: str
    cpu_count: int
    cpu_governor: str | None
    memory_total_bytes: int
    gpu_name: str | None
    gpu_driver: str | None
    gpu_memory_bytes: int | None
    python_version: str
    library_versions: dict[str, str]
    kernarc_version: str
    git_commit: str | None
    git_dirty: bool | None


class LaunchRecord(Record):
    """One launch of one build: how long it took to be ready, and the machine around it."""

    build: str
    launch: int
    ready_s: float
    samples: tuple[EnvironmentSample, ...] = ()
    server_counters_before: dict[str, float] = {}
    server_counters_after: dict[str, float] = {}
    void_reason: str | None = None
    crowded_streams: int = 0  # measured while another resident engine was using the processor


class Interruption(Record):
    """A run that stopped before its end, and was resumed."""

    wall_utc: str
    reason: str
    streams_done: int


class RunManifest(Record):
    """The plan, the machine and the builds of one run."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    kind: str  # bench, compare, calibrate
    created_utc: str
    config_name: str
    config_yaml: str  # the effective configuration, as YAML
    builds: tuple[BuildRecord, ...]  # baseline first
    depths: tuple[int, ...]
    requests_per_depth: int  # a launch
    max_tokens: int
    seed: int
    launches: int
    max_void_streams_per_cell: int = 0
    residency: str  # both: engines resident together; alternate: one after the other
    requests_sha256: str
    prompt_source: str  # "stdlib text" or "random ids", and its hash
    environment: Environment
    launch_records: tuple[LaunchRecord, ...] = ()
    interruptions: tuple[Interruption, ...] = ()
    finished_utc: str | None = None
