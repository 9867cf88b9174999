"""What the gate writes down: the words of a decision and everything it stands on. verdict.json is a GateOutcome."""

from enum import StrEnum

from ..harness.run.records import SCHEMA_VERSION, Record


class Verdict(StrEnum):
    """PASS is the only one that lets a change through."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    VOID = "VOID"

    @property
    def exit_code(self) -> int:
        """0 pass, 1 regression or wrong output, 3 inconclusive, 4 the measurement is void."""
        return {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INCONCLUSIVE: 3, Verdict.VOID: 4}[self]


class Attribution(Record):
    """Where one depth's effect comes from; (1 + effect) = (1 + step_effect)·(1 + acceptance_effect). Fractions.

    step_effect +0.02: each step takes 2 % longer. acceptance_effect +0.02: 2 % slower because a step yields fewer
    tokens. Bounds are those of the deciding interval, None where it is undefined.
    """

    step_effect: float
    step_low: float | None
    step_high: float | None
    acceptance_effect: float
    acceptance_low: float | None
    acceptance_high: float | None


class Estimator(StrEnum):
    """How launches became an estimate. CROSSOVER: the mean of both start orders' means; else the mean of launches."""

    LAUNCH_MEAN = "launch mean"
    CROSSOVER = "crossover"


class OrderEffect(Record):
    """What being started second in a launch does to either build: −0.05 = 5 % faster. Out of the estimate already."""

    effect: float
    low: float | None
    high: float | None


class FirstTokenEffect(Record):
    """What the candidate does to the time to first token: +0.5 = half as long again. Bounds None while undefined."""

    effect: float
    low: float | None
    high: float | None


class DepthOutcome(Record):
    """One depth: effects and bounds as fractions (+0.02 = 2 % slower); bounds are None while undefined."""

    depth: int
    point_estimate: float
    low: float | None
    high: float | None
    bootstrap_low: float | None
    bootstrap_high: float | None
    student_low: float | None
    student_high: float | None
    launches: int
    pairs: int
    attribution: Attribution | None  # None where events are not steps
    order_effect: OrderEffect | None = None  # None where start order does not vary
    first_token: FirstTokenEffect | None = None  # not part of the verdict
    words: str = ""  # the attribution in words, written by reports


class Rate(Record):
    """A share of positions with its 95 % interval, clustered by request: positions of one text share its luck."""

    rate: float
    low: float
    high: float


class EmittedToken(Record):
    """One position of one output where the reference preferred another token. position counts from 0 in the output."""

    request_id: str
    depth: int
    position: int
    emitted: int
    preferred: int
    gap: float | None  # logits; None where it is not finite


class OutputOutcome(Record):
    """The output check of one build: counts over every emitted token of its measured streams.

    verdict INCONCLUSIVE: the check could not run; VOID: nothing to check, or degenerate text; reason says which.
    tau: the gap up to which a lower choice is a near-tie, from the reference in bf16 against itself in fp32.
    max_divergence_rate: the share of each stream's tokens that was allowed to diverge; None where nothing was read.
    is_structured: the weights fix every token by margins that wrong numerics do not bridge, so a pass says little of
    those. bf16_near_tie_rate, max_near_tie_rate: what bf16 alone gives on this text, and what is let through; None
    where the reference's tokens are known by construction.
    """

    build: str
    verdict: Verdict
    reason: str
    remedy: str = ""  # what lets a check judge that could not, a sentence; "" where it did
    reference: str = ""
    is_structured: bool = False
    tau: float | None = None
    max_divergence_rate: float | None = None
    streams: int = 0
    positions: int = 0
    matches: int = 0
    near_ties: int = 0
    divergences: int = 0
    worst_gap: float | None = None  # logits; None without positions or where it is not finite
    match_rate: Rate | None = None
    near_tie_rate: Rate | None = None
    bf16_near_tie_rate: float | None = None
    max_near_tie_rate: float | None = None
    divergence_rate: Rate | None = None
    worst: tuple[EmittedToken, ...] = ()
    truncated: tuple[str, ...] = ()  # request ids of outputs shorter than asked for
    repetition_loops: tuple[str, ...] = ()  # request ids

    @property
    def allowed_words(self) -> str:
        """What passed although it diverged: "3 divergences, up to 2 % a stream allowed"; "" where nothing did."""
        if not self.divergences or self.max_divergence_rate is None:
            return ""
        return allowed_words(self.divergences, self.max_divergence_rate)


def allowed_words(divergences: int, max_divergence_rate: float) -> str:
    """ "3 divergences, up to 2 % a stream allowed"."""
    plural = "" if divergences == 1 else "s"
    return f"{divergences:,} divergence{plural}, up to {max_divergence_rate * 100:.4g} % a stream allowed"


class Crowding(Record):
    """How many of a build's streams were measured while a resident neighbour's engine (busy) used the processor."""

    build: str
    streams: int
    crowded: int
    busy: tuple[str, ...]


class GateOutcome(Record):
    """verdict.json: what was decided about one comparison, why, and what to do next."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    baseline: str
    candidate: str
    verdict: Verdict
    speed_verdict: Verdict
    improved_depths: tuple[int, ...]
    margin: float
    confidence: float  # family-wise, of this look
    estimator: Estimator = Estimator.LAUNCH_MEAN
    launches: int
    launch_limit: int
    depths: tuple[DepthOutcome, ...]
    output_checks: tuple[OutputOutcome, ...]  # baseline first
    identity: str  # whether both builds emitted the same ids, and where they first part
    void_reasons: tuple[str, ...]
    crowding: tuple[Crowding, ...] = ()  # as far as it voids
    launches_needed: int | None
    not_restarted: tuple[str, ...] = ()  # builds whose server kept running, so that repeats decide nothing on speed
    seconds_a_launch: float | None
    order_words: str = ""  # what start order did, where it did more than the margin; written by reports
    sentence: str = ""  # what was decided and why, written by reports
    next_step: str = ""
