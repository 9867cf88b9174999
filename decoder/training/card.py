"""README.md of the model folder: data, recipe, date and scores, made from training.json beside it."""

from __future__ import annotations

from json import dumps, loads
from pathlib import Path
from typing import Any, NotRequired, TypedDict

INTRODUCTION = (
    "A `qwen3_5_text` model of {millions:.2f} million parameters that writes Python: three Gated DeltaNet layers "
    "to each full-attention layer, a byte-level BPE tokenizer, and one MTP layer trained for three recursive "
    "drafts. It exists to be decoded by engines under test, on real text and with real acceptance. It is no "
    "assistant: what it writes looks like Python and need not run."
)
RECIPE = (
    "Trained on {date} for {seconds:.0f} s on one {device} (torch {torch}): {steps} steps of {tokens_per_step} "
    "tokens, {millions:.0f} million in all, {lengths}. Muon for the matrices, AdamW for the rest, peak learning "
    "rate {peak_learning_rate}, flat to 30 %, then falling; seed {seed}. The drafts learn the main model's "
    "own distribution, each later draft from the hidden state of the one before it."
)
UNLOOP = (
    "Then {steps} steps in {seconds:.0f} s, each on as much text again and on the model's own greedy continuations of "
    "training text ({lengths} tokens), where the tokens that carry on a loop are made unlikely and the drafts learn "
    "too; learning rate {learning_rate}, falling to zero. The weights lie at {stretch} times their "
    "change: further along fewer loops are left, at a cost in bits per byte."
)
DATA = (
    "Gathered by `python -m kernarc.decoder.training.prepare --out TEXT`, with `--library VERSION=DIR` for each Python "
    "and packages as packages.py pins them: {library:.1f} MB of the standard library's sources (Python {versions}, "
    "PSF-2.0; {share:.0%} of the sequences) and {packages:.1f} MB of packages whose own metadata names only permissive "
    "licences. Left out: {dropped_duplicates} exact copies, {dropped_overlaps} files that repeat ten or more runs of "
    "four held-out lines, tables, and the tests of held-out modules."
)


class TrainingFacts(TypedDict):
    """training.json: everything about a training run that the card tells."""

    date: str
    device: str
    torch: str
    command: str
    seed: int
    steps: int
    tokens: int
    seconds: float
    peak_learning_rate: float
    tokens_per_step: int
    sequence_lengths: dict[str, float]
    parameters: int
    unloop: NotRequired[dict[str, Any]]
    data: dict[str, Any]
    history: list[dict[str, float]]
    scores: dict[str, Any]


def read_facts(folder: Path) -> TrainingFacts:
    """The facts beside a checkpoint."""
    facts: TrainingFacts = loads((folder / "training.json").read_text())
    return facts


def write_facts(facts: TrainingFacts, folder: Path) -> None:
    """Writes training.json and the card made from it."""
    (folder / "training.json").write_text(dumps(facts, indent=1) + "\n")
    (folder / "README.md").write_text(render(facts, folder.resolve().name))


def add_scores(folder: Path, scores: dict[str, Any]) -> None:
    """Adds (or replaces) scores in training.json and the card."""
    facts = read_facts(folder)
    facts["scores"] |= scores
    write_facts(facts, folder)


def add_stage(folder: Path, unloop: dict[str, Any], scores: dict[str, Any]) -> None:
    """Tells of a run of unloop.py, and what it scored, in training.json and the card."""
    facts = read_facts(folder)
    facts["unloop"] = unloop
    facts["scores"] |= scores
    write_facts(facts, folder)


def _recipe(facts: TrainingFacts) -> list[str]:
    lengths = ", ".join(f"{share:.0%} of steps at {n} tokens" for n, share in facts["sequence_lengths"].items())
    paragraphs = [RECIPE.format(**facts, millions=facts["tokens"] / 1e6, lengths=lengths)]
    if unloop := facts.get("unloop"):
        paragraphs.append(UNLOOP.format(**unloop, lengths=", ".join(dict.fromkeys(unloop["rollouts"]))))
    return [*paragraphs, f"    {facts['command']}"]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows)]


def _shown(value: object) -> str:
    return ", ".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def render(facts: TrainingFacts, name: str) -> str:
    """The card's Markdown."""
    data = facts["data"]
    packages = sorted(data["packages"], key=lambda row: (-row["bytes"], row["name"]))
    package_rows: list[tuple[str, ...]] = [
        (f"{p['name']} {p['version']}", p["licence"], f"{p['bytes'] / 1e6:.2f}") for p in packages
    ]
    data_line = DATA.format(
        library=data["library_bytes"] / 1e6,
        versions=", ".join(data["library_versions"]),
        share=data["library_share"],
        packages=data["package_bytes"] / 1e6,
        **{key: data[key] for key in ("dropped_duplicates", "dropped_overlaps")},
    )
    paragraphs = [
        f"# {name}",
        INTRODUCTION.format(millions=facts["parameters"] / 1e6),
        "## Scores",
        "On standard-library modules kept out of training; heldout.json names them and the rule that chose them. "
        "Printed by `python -m kernarc.decoder.training.evaluate MODEL` and "
        "`python -m kernarc.decoder.training.agreement MODEL`.",
        "\n".join(_table(("measure", "value"), [(k, _shown(v)) for k, v in facts["scores"].items()])),
        "## Recipe",
        *_recipe(facts),
        "## Data",
        data_line,
        "\n".join(_table(("package", "licence in its metadata", "MB"), package_rows)),
    ]
    return "\n\n".join(paragraphs) + "\n"
