"""The output check of a run: references that cannot be used never pass, and two builds are told apart at a token."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from kernarc.decoder.checkpoint.synthetic import TokenCycle, write_structured_checkpoint
from kernarc.gates.config import OutputCheckConfig
from kernarc.gates.outcomes import Verdict
from kernarc.gates.output.reference import Reference
from kernarc.gates.output.run_check import RunChecker, void_rules_of
from kernarc.harness.config.models import VoidRulesConfig
from kernarc.harness.run.records import RunManifest, StreamRecord
from kernarc.harness.run.storage import Request

from ...fakes.broken_engines import greedy, random_model, write

MakeStream = Callable[..., StreamRecord]
PROMPT = tuple(torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(9)).tolist())
REQUESTS = {"d128-l0-r0": Request(request_id="d128-l0-r0", depth=128, launch=0, prompt_ids=PROMPT)}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(random_model(), tmp_path_factory.mktemp("run-check") / "model")


@pytest.fixture(scope="module")
def output() -> list[int]:
    return greedy(random_model(), list(PROMPT), 16)


def with_models(manifest: RunManifest, model: Path, engine: str = "kernarc") -> RunManifest:
    builds = tuple(build.model_copy(update={"model": str(model), "engine": engine}) for build in manifest.builds)
    return manifest.model_copy(update={"builds": builds})


def ignore(done: int, total: int) -> None:
    """Progress of no interest."""


def test_difference_is_named_with_what_the_reference_thinks(
    make_stream: MakeStream, made_up_manifest: RunManifest, model_dir: Path, output: list[int], tmp_path: Path
) -> None:
    checker = RunChecker(with_models(made_up_manifest, model_dir), OutputCheckConfig(device="cpu"), tmp_path)
    other = [*output[:6], (output[6] + 1) % 512, *output[7:]]
    streams = [make_stream("a", token_ids=tuple(output)), make_stream("b", token_ids=tuple(other))]
    steps: list[tuple[int, int]] = []
    found = checker.check(["a", "b"], streams, REQUESTS, lambda done, total: steps.append((done, total)))
    assert [check.verdict for check in found] == [Verdict.PASS, Verdict.FAIL]
    assert found[0].max_near_tie_rate is not None
    assert found[0].max_near_tie_rate >= 3 / 16  # three positions of so few are always let through
    assert steps == [(1, 2), (2, 2)]
    sentence = checker.identity("a", "b", streams, REQUESTS)
    assert "first different in d128-l0-r0 at output token 6" in sentence
    assert f"a emitted {output[6]} (gap 0, the reference's choice)" in sentence
    assert f"b emitted {other[6]}" in sentence
    assert "a divergence" in sentence


def test_a_structured_checkpoint_judges_by_its_known_output(
    make_stream: MakeStream, made_up_manifest: RunManifest, tmp_path: Path
) -> None:
    folder = tmp_path / "structured"
    write_structured_checkpoint("tiny", folder, seed=3)
    cycle = TokenCycle.of_checkpoint(folder, 2048)
    right = cycle.continuation(PROMPT[-1], 16)
    wrong = [*right[:6], (right[6] + 1) % 2048, *cycle.continuation((right[6] + 1) % 2048, 9)]  # one, then consistent
    beyond = [*right[:15], 5000]
    config = OutputCheckConfig(device="cpu", reference="known_output")
    checker = RunChecker(with_models(made_up_manifest, folder), config, tmp_path / "cache")
    for output, divergences in ((right, 0), (wrong, 1), (beyond, 1)):
        streams = [make_stream("a", token_ids=tuple(output))]
        [outcome] = checker.check(["a"], streams, REQUESTS, ignore)
        assert outcome.verdict is (Verdict.FAIL if divergences else Verdict.PASS)
        assert (outcome.positions, outcome.divergences) == (16, divergences)
        assert outcome.reference == "known output of structured"
        assert (outcome.tau, outcome.max_near_tie_rate) == (0.0, None)
    assert next(Reference.load(folder, device="cpu").logit_rows(PROMPT, right)).argmax(-1).tolist() == right


@pytest.mark.parametrize("reference", ["transformers", "known_output"])
def test_a_pass_on_structured_weights_says_so_whatever_judged_it(
    reference: Literal["transformers", "known_output"],
    make_stream: MakeStream,
    made_up_manifest: RunManifest,
    tmp_path: Path,
) -> None:
    """Also of a server whose checkpoint is named in the configuration alone."""
    folder = tmp_path / "structured"
    write_structured_checkpoint("tiny", folder, seed=3)
    right = TokenCycle.of_checkpoint(folder, 2048).continuation(PROMPT[-1], 16)
    config = OutputCheckConfig(device="cpu", reference=reference, reference_model=str(folder))
    checker = RunChecker(with_models(made_up_manifest, tmp_path, "endpoint"), config, tmp_path / "cache")
    [outcome] = checker.check(["a"], [make_stream("a", token_ids=tuple(right))], REQUESTS, ignore)
    assert (outcome.verdict, outcome.is_structured) == (Verdict.PASS, True)
    assert "says little about numerics (the gate `text` checks those)" in outcome.reason


def test_other_checkpoints_have_no_known_output(
    make_stream: MakeStream, made_up_manifest: RunManifest, model_dir: Path, output: list[int], tmp_path: Path
) -> None:
    config = OutputCheckConfig(device="cpu", reference="known_output")
    checker = RunChecker(with_models(made_up_manifest, model_dir), config, tmp_path)
    [outcome] = checker.check(["a"], [make_stream("a", token_ids=tuple(output))], REQUESTS, ignore)
    assert outcome.verdict is Verdict.INCONCLUSIVE
    assert "has no known output" in outcome.reason
    assert "check others with output_check.reference transformers" in outcome.reason


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04", b"half"])
def test_a_structured_checkpoint_that_lost_its_known_output_is_to_be_made_again(
    content: bytes | None, make_stream: MakeStream, made_up_manifest: RunManifest, tmp_path: Path
) -> None:
    """As one made before there was such a file, or one that was copied in part."""
    folder = tmp_path / "structured"
    write_structured_checkpoint("tiny", folder, seed=3)
    (folder / "next_tokens.npy").unlink()
    if content is not None:
        (folder / "next_tokens.npy").write_bytes(content)
    config = OutputCheckConfig(device="cpu", reference="known_output")
    checker = RunChecker(with_models(made_up_manifest, folder), config, tmp_path / "cache")
    [outcome] = checker.check(["a"], [make_stream("a", token_ids=(1, 2))], REQUESTS, ignore)
    assert outcome.verdict is Verdict.INCONCLUSIVE
    assert "delete the folder and make it again" in outcome.reason


def test_endpoint_without_a_named_reference_is_inconclusive(
    make_stream: MakeStream, made_up_manifest: RunManifest, model_dir: Path, output: list[int], tmp_path: Path
) -> None:
    manifest = with_models(made_up_manifest, model_dir, "endpoint")
    streams = [make_stream("a", token_ids=tuple(output))]
    [unknown] = RunChecker(manifest, OutputCheckConfig(device="cpu"), tmp_path).check(["a"], streams, REQUESTS, ignore)
    assert (unknown.verdict, unknown.positions) == (Verdict.INCONCLUSIVE, 0)
    assert "reference_model" in unknown.reason
    assert "reference_model" in unknown.remedy
    named = OutputCheckConfig(device="cpu", reference_model=str(model_dir))
    [known] = RunChecker(manifest, named, tmp_path).check(["a"], streams, REQUESTS, ignore)
    assert known.verdict is Verdict.PASS


@pytest.mark.parametrize("fault", ["nowhere", "no weights"])
def test_unreadable_reference_is_inconclusive_and_says_why(
    make_stream: MakeStream, made_up_manifest: RunManifest, output: list[int], tmp_path: Path, fault: str
) -> None:
    folder = tmp_path / "model"
    if fault == "no weights":
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "qwen3_5_text"}')
    checker = RunChecker(with_models(made_up_manifest, folder), OutputCheckConfig(device="cpu"), tmp_path / "cache")
    [found] = checker.check(["a"], [make_stream("a", token_ids=tuple(output))], REQUESTS, ignore)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "the reference cannot be used" in found.reason
    assert "name a checkpoint directory" in found.remedy


@pytest.mark.parametrize("reference", ["transformers", "known_output"])
def test_a_server_that_sends_no_ids_is_told_to_send_them(
    reference: Literal["transformers", "known_output"],
    make_stream: MakeStream,
    made_up_manifest: RunManifest,
    tmp_path: Path,
) -> None:
    """Another reference would not help; text alone says no tokens."""
    write_structured_checkpoint("tiny", tmp_path / "model", seed=3)
    config = OutputCheckConfig(device="cpu", reference=reference)
    checker = RunChecker(with_models(made_up_manifest, tmp_path / "model"), config, tmp_path / "cache")
    [found] = checker.check(["a"], [make_stream("a", token_ids=())], REQUESTS, ignore)
    assert found.verdict in (Verdict.INCONCLUSIVE, Verdict.VOID)
    assert "no emitted token" in found.reason
    assert "return_token_ids" in found.remedy


def test_build_without_sound_output_never_passes(
    made_up_manifest: RunManifest, model_dir: Path, tmp_path: Path
) -> None:
    checker = RunChecker(with_models(made_up_manifest, model_dir), OutputCheckConfig(device="cpu"), tmp_path)
    [found] = checker.check(["a"], [], REQUESTS, ignore)
    assert found.verdict is not Verdict.PASS


def test_early_end_passes_only_at_an_end_token_and_only_where_the_run_allows_it(
    make_stream: MakeStream, made_up_manifest: RunManifest, output: list[int], tmp_path: Path
) -> None:
    folder = write(random_model(), tmp_path / "model")
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {output[7]}}}')
    manifest = with_models(made_up_manifest, folder)
    ended = [make_stream("a", token_ids=tuple(output[:8]), max_tokens=16)]
    cut = [make_stream("a", token_ids=tuple(output[:6]), max_tokens=16)]
    noted, void = VoidRulesConfig(early_stop="note"), VoidRulesConfig()
    for streams, rules, expected in (
        (ended, noted, Verdict.PASS),
        (ended, void, Verdict.FAIL),
        (cut, noted, Verdict.FAIL),
    ):
        checker = RunChecker(manifest, OutputCheckConfig(device="cpu"), tmp_path / "cache", rules)
        [found] = checker.check(["a"], streams, REQUESTS, ignore)
        assert found.verdict is expected


def test_reference_that_runs_out_of_memory_is_inconclusive(
    make_stream: MakeStream,
    made_up_manifest: RunManifest,
    model_dir: Path,
    output: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_large(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("planted")

    streams = [make_stream("a", token_ids=tuple(output))]
    for broken in ("_contenders", "_scored"):
        with monkeypatch.context() as planted:
            planted.setattr(f"kernarc.gates.output.scoring.ReferenceScorer.{broken}", too_large)
            checker = RunChecker(
                with_models(made_up_manifest, model_dir), OutputCheckConfig(device="cpu"), tmp_path / broken
            )
            [found] = checker.check(["a"], streams, REQUESTS, ignore)
        assert found.verdict is Verdict.INCONCLUSIVE
        assert "planted" in found.reason
        assert "lower output_check.chunk_tokens" in found.remedy


def test_rules_come_from_the_runs_own_configuration(made_up_manifest: RunManifest) -> None:
    kept = made_up_manifest.model_copy(update={"config_yaml": "void_rules:\n  repetition_loop: note\n"})
    assert void_rules_of(kept).repetition_loop == "note"
    assert void_rules_of(made_up_manifest) == VoidRulesConfig()
