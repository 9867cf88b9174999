"""A reduced draft vocabulary: output unchanged whatever it holds, counted right, refused where it is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kernarc.decoder.checkpoint.draft_vocabulary import DraftVocabulary, count_outputs
from kernarc.decoder.errors import CheckpointError, DecoderError, RequestError
from kernarc.decoder.generate import Decoder, Step

from ...fakes.decoder_checkpoints import RandomCheckpoint

PROMPT = [5, 77, 140, 3, 9]


def steps(checkpoint: RandomCheckpoint, vocabulary: Path | None, num_drafts: int = 3) -> list[Step]:
    decoder = Decoder.load(
        checkpoint.path, device="cpu", max_context=200, num_speculative_tokens=num_drafts, draft_vocab=vocabulary
    )
    return list(decoder.generate(PROMPT, max_tokens=60, ignore_eos=True))


def ids(of: list[Step]) -> list[int]:
    return [token for step in of for token in step.token_ids]


def test_output_is_unchanged_whatever_may_be_drafted(base_checkpoint: RandomCheckpoint, tmp_path: Path) -> None:
    plain = steps(base_checkpoint, None)
    emitted = sorted(set(ids(plain)))
    never = sorted(set(range(211)) - set(emitted))
    for name, chosen in (("all", list(range(211))), ("never emitted", never[:40]), ("one", [emitted[0]])):
        DraftVocabulary(tuple(chosen), name).write(tmp_path / "v.json")
        reduced = steps(base_checkpoint, tmp_path / "v.json")
        assert ids(reduced) == ids(plain), name
        if name == "all":
            assert reduced == plain  # and the very same drafts
        if name == "never emitted":
            assert sum(step.accepted for step in reduced) == 0  # so the set is what is drafted from


def test_counting_takes_the_most_frequent_and_fills_up() -> None:
    counted = count_outputs([[9, 9, 9, 4], [7, 7, 4, 2]], size=3, vocab_size=12, source="two runs")
    assert counted.vocabulary == DraftVocabulary((9, 4, 7), "two runs")  # 4 and 7 are seen twice, 4 is lower
    assert (counted.outputs, counted.seen, counted.coverage) == (8, 4, 7 / 8)
    filled = count_outputs([[9, 1]], size=5, vocab_size=12, source="")
    assert filled.vocabulary.ids == (1, 9, 0, 2, 3)
    assert filled.coverage == 1.0


def test_counting_refuses_what_cannot_be() -> None:
    for outputs, size, said in (([[]], 3, "no output"), ([[12]], 3, "holds token 12"), ([[1]], 13, "of 13 ids")):
        with pytest.raises(DecoderError, match=said):
            count_outputs(outputs, size=size, vocab_size=12, source="")


def test_rows_are_ascending_and_fill_a_multiple() -> None:
    assert DraftVocabulary((9, 1, 5), "").rows(1, 100).tolist() == [1, 5, 9]
    assert DraftVocabulary((9, 1, 5), "").rows(4, 100).tolist() == [0, 1, 5, 9]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ('{"ids": []}', "lists no ids"),
        ("[1, 2]", "lists no ids"),
        ('{"ids": [1, 211]}', "id 1 is 211, expected 0 … 210"),
        ('{"ids": [true]}', "id 0 is True"),
        ('{"ids": [4, 5, 4]}', "id 4 is listed 2 times"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_wrong_file_is_refused(
    content: str | None, said: str, base_checkpoint: RandomCheckpoint, tmp_path: Path
) -> None:
    path = tmp_path / "v.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CheckpointError, match=said):
        steps(base_checkpoint, path)


def test_it_is_refused_where_nothing_is_drafted(base_checkpoint: RandomCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "v.json").write_text(json.dumps({"ids": [1], "source": "x"}))
    with pytest.raises(RequestError, match="no tokens are drafted"):
        steps(base_checkpoint, tmp_path / "v.json", num_drafts=0)
