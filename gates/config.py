"""What a gate is told before it starts: measurement, margin, looks, output check. No key skips a check."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from ..harness.config.models import MeasurementConfig
from ..harness.config.yaml_files import ConfigModel
from .intervals import MIN_LAUNCHES


class OutputCheckConfig(ConfigModel):
    """How every emitted token is judged against the reference implementation."""

    # known_output: of structured checkpoints, token for token, where no reference model fits (known_output.py)
    reference: Literal["transformers", "known_output"] = "transformers"
    reference_model: str | None = None  # checkpoint directory; None: the build's own. Endpoints need it.
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the reference
    device: Literal["auto", "cpu", "cuda"] = "auto"
    chunk_tokens: Annotated[int, Field(ge=16, le=65_536)] = 2048  # read at once
    calibration_streams_per_depth: Annotated[int, Field(ge=1, le=1000)] = 2  # τ: bf16 against fp32 on these
    # for engines that round activations (FP8); lets through the near-ties that come with it too (near_ties.py)
    max_divergence_rate: Annotated[float, Field(ge=0, lt=1)] = 0.0


class GateConfig(MeasurementConfig):
    """One gate: the measurement of both builds, and the rule that decides."""

    folder: ClassVar[str] = "gates"

    requests_per_depth: Annotated[int, Field(ge=1, le=10_000)] = 20
    margin: Annotated[float, Field(gt=0, lt=1)] = 0.01  # a slowdown up to this fraction is let through
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95  # for all depths and all looks together
    looks: Annotated[tuple[int, ...], Field(min_length=1)] = (5, 8, 12)  # launches at each look; the last is the limit
    n_resamples: Annotated[int, Field(ge=1000, le=1_000_000)] = 10_000
    control: str | None = None  # a build measured in every block; its own drift voids the block
    max_control_drift: Annotated[float, Field(gt=0, lt=1)] = 0.05
    max_void_block_share: Annotated[float, Field(ge=0, lt=1)] = 0.2  # more voided blocks than this void the comparison
    output_check: OutputCheckConfig = OutputCheckConfig()

    @field_validator("looks")
    @classmethod
    def _looks_rise(cls, looks: tuple[int, ...]) -> tuple[int, ...]:
        if list(looks) != sorted(set(looks)) or looks[0] < MIN_LAUNCHES:
            raise ValueError(f"launches must rise and start at {MIN_LAUNCHES} or more")
        return looks

    @property
    def confidence_of_a_look(self) -> float:
        """The error is split evenly over the looks, so that together they keep it (Bonferroni)."""
        return 1 - (1 - self.confidence) / len(self.looks)

    @property
    def launch_limit(self) -> int:
        """Launches after which the gate gives up with INCONCLUSIVE."""
        return self.looks[-1]
