"""General notes: every condition of the numbers, in words, from the manifest alone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..harness import format as fmt
from ..harness.run.records import BuildRecord, Environment
from .saved import CheckState, SavedRun
from .table_files import draft_head, table_notes
from .tables import SpeedTable

_WHERE = ("--model", "--host", "--port")  # options, each with a value, that change from run to run


@dataclass(frozen=True)
class Note:
    """One numbered note: a word to find it by, and its text."""

    title: str
    text: str


def general_notes(runs: Sequence[SavedRun], table: SpeedTable) -> tuple[Note, ...]:
    """The notes in the order of the published sheet: what, where, on what, when, against what, how decided."""
    notes = [
        Note(
            "Speed",
            "Decode tokens per second of one stream: 1000 ÷ median time per output token (TPOT) in ms. TPOT is the "
            "time from the first token to the last, divided by the tokens after the first event, stamped at the "
            "client's socket before anything is parsed. The wait for the first token is not in it.",
        ),
        Note("Context depth", _depths(runs, table)),
        Note("Model", _grouped((column.label, _model(column.build)) for column in table.columns)),
        Note("Builds", _grouped((column.label, _software(column.build)) for column in table.columns)),
        Note("Started with", _grouped((column.label, _arguments(column.build)) for column in table.columns)),
        Note("Hardware", _joined(_hardware(run.manifest.environment) for run in runs)),
        Note("Software", _joined(_versions(run.manifest.environment) for run in runs)),
        Note("Measured", _joined(_measured(run) for run in runs)),
        Note("Pairing", " ".join(_pairing(runs, table))),
        Note("Intervals", _intervals(table)),
        Note("Output check", " ".join(_checks(runs, table))),
    ]
    if clocks := [line for run in runs for line in _clocks(run)]:
        notes.append(Note("Clocks and power", " ".join(clocks)))
    lost = [line for run in runs for line in _losses(run)]
    if lost:
        notes.append(Note("Void and interrupted", " ".join(lost)))
    return tuple(notes)


def _depths(runs: Sequence[SavedRun], table: SpeedTable) -> str:
    lengths = _joined(fmt.count(run.manifest.max_tokens) for run in runs)
    sources = fmt.short_hashes(_joined(run.manifest.prompt_source for run in runs))
    return (
        f"The prompt's length in tokens, sent as token ids: {', '.join(fmt.count(depth) for depth in table.depths)}. "
        f"Greedy decoding, batch 1, {lengths} tokens out of every request, end of text ignored. Prompts: {sources}."
    )


def _model(build: BuildRecord) -> str:
    sha = f" (sha256 {build.model_sha256[:12]})" if build.model_sha256 else ""
    if build.num_speculative_tokens is None:
        drafts = "drafts unknown"
    elif build.num_speculative_tokens == 0:
        drafts = "no drafts"
    else:
        drafts = f"{build.num_speculative_tokens} draft tokens a step"
    if build.draft_vocab_size is not None:
        drafts += f", {draft_head(build)}"
    if build.structured_acceptance is not None:
        sha += f", structured weights (a known output, acceptance chosen as {build.structured_acceptance:g})"
    return f"{fmt.model_name(build.model)}{sha}, {drafts}"


def _software(build: BuildRecord) -> str:
    text = f"{build.engine}{f' {build.engine_version}' if build.engine_version else ''}"
    if build.library_versions:
        text += f" with {_libraries(build.library_versions)}"
    if build.git_commit:
        text += f", commit {build.git_commit[:12]}{' with uncommitted changes' if build.git_dirty else ''}"
    elif build.sources_sha256:
        text += f", of no known commit (sources sha256 {build.sources_sha256[:12]})"
    return text


def _arguments(build: BuildRecord) -> str:
    """The options of the command line that served it, less those that say where, and variables that were set."""
    shown: list[str] = []
    words = iter(build.command)
    for word in words:
        if word in _WHERE:
            next(words, None)
        elif shown or word.startswith("--"):
            shown.append(fmt.model_name(word))
    variables = [f"{name}={value}" for name, value in sorted(build.environment.items())]
    return " ".join([*variables, *shown]) or "nothing that is known here"


def _clocks(run: SavedRun) -> Iterable[str]:
    """What the card's clock did; its own power limit is a condition of the numbers, not a fault."""
    samples = [sample for record in run.manifest.launch_records for sample in record.samples]
    clocks = [sample.gpu_sm_clock_mhz for sample in samples if sample.gpu_sm_clock_mhz is not None]
    if not clocks:
        return
    watts = [sample.gpu_power_w for sample in samples if sample.gpu_power_w is not None]
    power = f", up to {fmt.count(round(max(watts)))} W" if watts else ""
    limited = sum("sw_power_cap" in sample.gpu_throttle_reasons for sample in samples)
    yield (
        f"Between streams the SM clock stood at {fmt.count(min(clocks))} to {fmt.count(max(clocks))} MHz{power}; the "
        f"card kept to its own power limit in {fmt.count(limited)} of {fmt.count(len(samples))} samples. Any other "
        "throttling voids a stream where the configuration says so."
    )


def _hardware(environment: Environment) -> str:
    if environment.gpu_name is None:
        gpu = "no GPU"
    else:
        memory = f", {fmt.gibibytes(environment.gpu_memory_bytes)}" if environment.gpu_memory_bytes else ""
        driver = f", driver {environment.gpu_driver}" if environment.gpu_driver else ""
        gpu = f"one {environment.gpu_name}{memory}{driver}"
    governor = f", governor {environment.cpu_governor}" if environment.cpu_governor else ""
    return (
        f"{gpu}; {environment.cpu_model}, {environment.cpu_count} cores{governor}, "
        f"{fmt.gibibytes(environment.memory_total_bytes)} of memory; {environment.platform}."
    )


def _versions(environment: Environment) -> str:
    libraries = _libraries(environment.library_versions)
    commit = f" at commit {environment.git_commit[:12]}" if environment.git_commit else ""
    dirty = " with uncommitted changes" if environment.git_dirty else ""
    return (
        f"kernarc-gate {environment.kernarc_version}{commit}{dirty}; Python {environment.python_version}; {libraries}: "
        "the environment of the client and of builds that have none of their own."
    )


def _libraries(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))


def _measured(run: SavedRun) -> str:
    manifest = run.manifest
    when = manifest.created_utc[:16].replace("T", " ")
    resident = "both engines resident at once" if manifest.residency == "both" else "one engine resident at a time"
    return (
        f"{when} UTC, run {manifest.run_id}, configuration {manifest.config_name}: {_launches(run)}, "
        f"{manifest.requests_per_depth} requests a depth in each, {resident}, seed {manifest.seed}."
    )


def _launches(run: SavedRun) -> str:
    """Those measured; the manifest of an unfinished run holds a limit."""
    launches = run.manifest.launches
    if run.why_unfinished is not None:
        return f"unfinished, {run.complete_launches} of at most {launches} launches of each engine complete"
    return f"{'one launch' if launches == 1 else f'{launches} launches'} of each engine"


def _pairing(runs: Sequence[SavedRun], table: SpeedTable) -> list[str]:
    if len(table.columns) < 2:
        return ["One build was measured; there is nothing to compare it with."]
    lines = []
    if any(not each.is_derived for each in table.speed_ups.values() if each.ratio is not None):
        lines.append(
            "Both builds answered the same requests in the same run, in ABBA order. Speed-up is the geometric mean of "
            "the per-request ratios, so it can differ in the last digit from the ratio of the two columns."
        )
    if table.has_derived:
        lines.append(
            "Columns from different sessions are marked derived: their speed-up is a ratio of two columns, not a "
            "measurement, and greedy text that changes between sessions moves it by several per cent."
        )
    return lines


def _intervals(table: SpeedTable) -> str:
    text = (
        "95 %. Of a median: 10,000 seeded two-level bootstrap resamples, launches first, then requests inside each. "
        "Of a paired speed-up: as the gate computes it, for all depths at once, the wider of that bootstrap and "
        "Student's t on launch means."
    )
    if any(cell.tpot is not None and cell.tpot.launches > 1 for cell in table.cells.values()):
        text += " A median of several launches reaches at least as far as Student's t on the logs of their medians."
    if any(each.is_crossover for each in table.speed_ups.values()):
        text += " Which engine was started first in a launch is taken out of it (crossover)."
    if any(each.launches == 1 for each in table.speed_ups.values()):
        text += " With one launch it holds the spread of requests alone, not that between launches."
    return text


def _checks(runs: Sequence[SavedRun], table: SpeedTable) -> list[str]:
    by_run = {run.manifest.run_id: run for run in runs}
    lines = [
        _grouped((column.label, _check_words(by_run[column.run_id], column.build.name)) for column in table.columns)
    ]
    for run in runs:
        if run.verdict is not None:
            lines.append(f"Gate: {run.verdict.get('verdict')}. {run.verdict.get('sentence', '')}".strip())
    return lines


def _check_words(run: SavedRun, build: str) -> str:
    check = run.output_check(build)
    if check.state is not CheckState.PASSED or check.outcome is None:
        return f"{check.reason}"
    outcome = check.outcome
    return (
        f"all {fmt.count(outcome.positions)} output tokens of the {fmt.count(outcome.streams)} streams behind these "
        f"numbers were checked against {outcome.reference or 'the reference'}: {fmt.count(outcome.matches)} matches, "
        f"{fmt.count(outcome.near_ties)} near-ties, "
        f"{outcome.allowed_words or f'{fmt.count(outcome.divergences)} divergences'}"
    )


def _losses(run: SavedRun) -> Iterable[str]:
    for interruption in run.manifest.interruptions:
        when = interruption.wall_utc[:16].replace("T", " ")
        done = fmt.count(interruption.streams_done)
        yield f"Run {run.manifest.run_id} was interrupted {when} UTC after {done} streams ({interruption.reason})."
    if run.why_unfinished is not None:
        yield f"Run {run.manifest.run_id} is unfinished: {run.why_unfinished}."
    if run.control.void_blocks:
        void_blocks, blocks = fmt.count(len(run.control.void_blocks)), fmt.count(run.control.blocks)
        yield (
            f"Run {run.manifest.run_id}: {void_blocks} of {blocks} blocks left out, because the control build "
            f"{run.manifest.builds[2].name} drifted there; their streams are in the records and in no number here."
        )
    void = sum(1 for stream in run.streams if stream.void_reason is not None)
    if void:
        yield f"Run {run.manifest.run_id}: {fmt.count(void)} of {fmt.count(len(run.streams))} streams void."


def _grouped(labelled: Iterable[tuple[str, str]]) -> str:
    """ "a, b: what both have in common. c: what it has." in order of appearance."""
    groups: dict[str, list[str]] = {}
    for label, text in labelled:
        groups.setdefault(text, []).append(label)
    return " ".join(f"{', '.join(labels)}: {text}." for text, labels in groups.items())


def _joined(parts: Iterable[str]) -> str:
    """Each different part once, in order."""
    return " ".join(dict.fromkeys(parts))


def footnotes(table: SpeedTable) -> list[str]:
    """What stands right below Table 1."""
    return table_notes(table)
