"""Prompts: exact, distinct from the first block on, and the same wherever they are made."""

import hashlib
import itertools
from pathlib import Path

import pytest
from kernarc.harness.errors import ConfigError
from kernarc.harness.run.requests import LibraryText, RandomIds, RequestSet, RequestShape, prompt_sha256, request_sha256
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

SHAPE = RequestShape(
    depths=(17, 128, 1000), requests_per_depth=5, warmup_requests_per_depth=2, launches=3, max_tokens=8, seed=7
)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "library"
    for name, words in {"b.py": 300, "a.py": 500, "site-packages/c.py": 400, "encodings/cp037.py": 400}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(" ".join(f"{name[0]}{number}" for number in range(words)))
    return folder


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    vocabulary = {"[unk]": 0} | {f"{letter}{n}": i * 1000 + n + 1 for i, letter in enumerate("ab") for n in range(500)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[unk]"))
    tokenizer.pre_tokenizer = Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def all_requests(requests: RequestSet) -> list[tuple[int, ...]]:
    return [r.prompt_ids for launch in range(SHAPE.launches) for r in requests.launch(launch)]


@pytest.mark.parametrize("vocab_size", [2, 1000, 248_320])
def test_lengths_are_exact_and_first_blocks_distinct(vocab_size: int) -> None:
    requests = RequestSet(SHAPE, RandomIds(vocab_size))
    made = [request for launch in range(3) for request in requests.launch(launch)]
    assert len(made) == 3 * 3 * (5 + 2)
    assert all(len(request.prompt_ids) == request.depth for request in made)
    assert len({request.prompt_ids[:16] for request in made}) == len(made)
    assert len({request.request_id for request in made}) == len(made)
    assert {request.request_id for request in made if request.is_warmup} == {
        f"d{depth}-l{launch}-w{n}" for depth, launch, n in itertools.product((17, 128, 1000), range(3), range(2))
    }


def test_ids_stay_below_the_vocabulary_and_avoid_the_excluded() -> None:
    ids = set(itertools.chain(*all_requests(RequestSet(SHAPE, RandomIds(50, excluded=[3, 49])))))
    assert ids == set(range(50)) - {3, 49}


def test_random_ids_are_the_same_for_ever() -> None:
    first = RequestSet(SHAPE, RandomIds(1000)).launch(0)[0]
    assert first.request_id == "d17-l0-w0"
    words = hashlib.shake_256(b"7:d17-l0-w0:0").digest(8 * 17)
    assert first.prompt_ids == tuple(int.from_bytes(words[8 * n : 8 * n + 8], "little") % 1000 for n in range(17))
    assert first.prompt_ids[:6] == (365, 526, 706, 698, 235, 928)


def test_the_hash_follows_everything_that_matters() -> None:
    def digest(seed: int = 7, vocab_size: int = 1000, max_tokens: int = 8) -> str:
        shape = RequestShape((17,), 2, 1, 2, max_tokens, seed)
        return RequestSet(shape, RandomIds(vocab_size)).sha256

    assert digest() == digest()
    assert len({digest(), digest(seed=8), digest(vocab_size=999), digest(max_tokens=9)}) == 4


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="no two ids"):
        RandomIds(3, excluded=[0, 1])


def test_library_text_is_sorted_read_without_site_packages_and_wraps(library: Path, tokenizer_json: Path) -> None:
    source = LibraryText(tokenizer_json, library)
    whole = source.ids("any", 800 * 2).tolist()
    start = whole.index(1)  # "a0", the first word of the first file
    assert whole[start : start + 500] == list(range(1, 501)), "a.py comes before b.py"
    assert whole[start + 500 : start + 800] == list(range(1001, 1301))
    assert whole[800:] == whole[:800]
    assert 0 not in whole
    assert len(source.sha256) == 64


def test_library_text_hash_follows_the_sources(library: Path, tokenizer_json: Path) -> None:
    before = LibraryText(tokenizer_json, library).sha256
    (library / "a.py").write_text("a0 a1 a2 " * 30)
    assert LibraryText(tokenizer_json, library).sha256 != before


def test_prompts_come_from_the_held_out_files_that_lie_beside_a_tokenizer(library: Path, tokenizer_json: Path) -> None:
    (tokenizer_json.parent / "heldout.json").write_text('{"files": [{"path": "b.py"}, {"path": "gone.py"}]}')
    source = LibraryText(tokenizer_json, library)
    assert set(source.ids("any", 600).tolist()) == set(range(1001, 1301))
    assert "held-out" in source.description


def test_a_broken_list_of_held_out_files_is_refused(library: Path, tokenizer_json: Path) -> None:
    (tokenizer_json.parent / "heldout.json").write_text('{"files": ["b.py"]}')
    with pytest.raises(ConfigError, match="no list of held-out files"):
        LibraryText(tokenizer_json, library)


def test_library_text_prompts_are_distinct(library: Path, tokenizer_json: Path) -> None:
    prompts = all_requests(RequestSet(SHAPE, LibraryText(tokenizer_json, library)))
    assert len({prompt[:16] for prompt in prompts}) == len(prompts)


def test_too_little_text_for_distinct_prompts_is_refused(tmp_path: Path, tokenizer_json: Path) -> None:
    folder = tmp_path / "short"
    folder.mkdir()
    (folder / "a.py").write_text(" ".join(f"a{n}" for n in range(40)))
    with pytest.raises(ConfigError, match="too few different first blocks"):
        RequestSet(SHAPE, LibraryText(tokenizer_json, folder))


def test_request_hashes_cover_ids_and_sampling() -> None:
    assert prompt_sha256([1, 2]) != prompt_sha256([1, 3])
    assert request_sha256([1, 2], 8) != request_sha256([1, 2], 9)
