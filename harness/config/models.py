"""What a measurement is told before it starts. Nothing here changes once a run exists."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from .yaml_files import ConfigModel

Seconds = Annotated[float, Field(gt=0, le=86_400)]
Depth = Annotated[int, Field(ge=17, le=1_048_576)]  # a first block of 16 tokens, and something to read after it

MAX_SPECULATIVE_TOKENS = 8


def _number_or_all(value: object) -> object:
    """Checked before the union is: of that each member would complain, under a name of pydantic's."""
    if value == "all" or (type(value) is int and value >= 0):
        return value
    raise ValueError("expected all or at least 0 prompt positions")


PromptPositions = Annotated[Annotated[int, Field(ge=0)] | Literal["all"], BeforeValidator(_number_or_all)]


class ModelSource(ConfigModel):
    """A checkpoint: a directory, or a structured one that is made once and kept in the cache."""

    path: str | None = None  # a directory, or the name of a shipped one
    synth: str | None = None  # tiny, 27b, or a path to a config.json
    acceptance: Annotated[float, Field(ge=0, le=1)] = 0.87
    emitted: Annotated[int, Field(ge=2)] | None = None  # how many tokens its output keeps to; None: the vocabulary
    fp8: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.synth is None):
            raise ValueError("give either 'path' (a checkpoint directory) or 'synth' (a shape to make)")
        return self


class BuildConfig(ConfigModel):
    """One engine on one model, with everything that may change its speed or its answers."""

    folder: ClassVar[str] = "builds"

    engine: Literal["kernarc", "vllm", "endpoint"]
    description: str = ""
    model: ModelSource | None = None  # None: the one the bench or gate names
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MAX_SPECULATIVE_TOKENS)] | None = None
    draft_vocab: str | None = None  # kernarc only: file of the tokens to draft; "model": draft_vocab.json beside it
    draft_window: PromptPositions | None = None  # kernarc only; None: its own default
    draft_context: PromptPositions | None = None  # the same
    device: Literal["auto", "cpu", "cuda"] = "auto"
    python: str | None = None  # interpreter that starts the engine; None: the engine's own
    pythonpath: tuple[str, ...] = ()  # put before everything else
    environment: dict[str, str] = Field(default_factory=dict)
    extra_args: tuple[str, ...] = ()  # added to the engine's command line
    url: str | None = None  # endpoint only
    served_model: str | None = None  # endpoint only: the name to send; None: the first one it lists
    vocab_size: Annotated[int, Field(ge=2)] = 1000  # endpoint only: prompts are random ids below it
    tokenizer: str | None = None  # endpoint only: a tokenizer.json, for prompts of real text
    api: Literal["completions", "chat"] = "completions"  # endpoint only; chat needs tokenizer, and /tokenize there
    api_key_variable: str | None = None  # endpoint only: the environment variable that holds its key
    events_are_steps: bool | None = None  # false: a server whose events are not steps; None: as the stream shows

    @property
    def tokenizer_json(self) -> Path | None:
        """The tokenizer of an endpoint, where one is named."""
        return None if self.tokenizer is None else Path(self.tokenizer).expanduser()

    @model_validator(mode="after")
    def _endpoint_has_a_url(self) -> Self:
        if (self.engine == "endpoint") != (self.url is not None):
            raise ValueError("'url' belongs to engine 'endpoint', which needs it")
        if self.engine == "endpoint" and (self.extra_args or self.environment or self.python or self.pythonpath):
            raise ValueError("an endpoint is not started by us: extra_args, environment, python, pythonpath do nothing")
        for key in ("draft_vocab", "draft_window", "draft_context"):
            if getattr(self, key) is not None and self.engine != "kernarc":
                raise ValueError(f"'{key}' belongs to engine 'kernarc'")
        if self.api == "chat" and self.tokenizer is None:
            raise ValueError("'api: chat' belongs to engine 'endpoint' and needs a 'tokenizer', to make text for it")
        return self


class LimitsConfig(ConfigModel):
    """How long to wait, the same for every build. A stream beyond a limit is void, never dropped.

    The first token may take first_token_s plus first_token_s_per_1k_tokens for each thousand tokens of the prompt.
    """

    start_s: Seconds = 900
    connect_s: Seconds = 10
    first_token_s: Seconds = 60
    first_token_s_per_1k_tokens: Annotated[float, Field(ge=0, le=3600)] = 10
    stall_s: Seconds = 60
    stream_s: Seconds = 3600

    def first_token_limit_s(self, prompt_tokens: int) -> float:
        """The limit for the first token of a prompt of this length, in seconds."""
        return self.first_token_s + self.first_token_s_per_1k_tokens * prompt_tokens / 1000


class VoidRulesConfig(ConfigModel):
    """What makes a measurement unusable; decided before the run, equal for every build."""

    max_void_streams_per_cell: Annotated[int, Field(ge=0)] = 0
    gpu_throttling: Literal["void", "note"] = "void"
    foreign_gpu_process: Literal["void", "note"] = "void"
    early_stop: Literal["void", "note"] = "void"  # a server that does not honour ignore_eos
    repetition_loop: Literal["void", "note"] = "void"  # output that mostly repeats itself is often the fastest


class MeasurementConfig(ConfigModel):
    """What a bench and a gate both need to know to measure."""

    model: ModelSource = ModelSource(synth="tiny")
    depths: Annotated[tuple[Depth, ...], Field(min_length=1)]
    requests_per_depth: Annotated[int, Field(ge=1, le=10_000)] = 4
    warmup_requests_per_depth: Annotated[int, Field(ge=1, le=100)] = 1
    max_tokens: Annotated[int, Field(ge=2, le=1_048_576)] = 128
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 20261130
    residency: Literal["both", "alternate"] = "both"
    limits: LimitsConfig = LimitsConfig()
    void_rules: VoidRulesConfig = VoidRulesConfig()

    @model_validator(mode="after")
    def _depths_rise(self) -> Self:
        if list(self.depths) != sorted(set(self.depths)):
            raise ValueError(f"'depths' must rise and not repeat, got {list(self.depths)}")
        return self


class BenchConfig(MeasurementConfig):
    """A table of builds by depths."""

    folder: ClassVar[str] = "benches"

    builds: Annotated[tuple[str, ...], Field(min_length=1)]  # baseline first; names, paths, endpoint:URL, git:REF
    builds_without_vllm: tuple[str, ...] = ()  # used instead where vLLM is not installed; () : refuse
    launches: Annotated[int, Field(ge=1, le=1000)] = 1
