"""What one streamed answer says, by the shapes that servers really send."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernarc.harness.client.checks import events_are_steps, problems
from kernarc.harness.client.completion import CompletionRequest
from kernarc.harness.client.repetition import find_repetition_loop
from kernarc.harness.client.token_counts import CountedBy, count_tokens, text_problem
from kernarc.harness.client.transcript import Transcript, error_message, read_transcript
from kernarc.harness.config.models import LimitsConfig
from kernarc.harness.run.records import TokenEvent

MS = 1_000_000
Json = dict[str, object]


class Letters:
    """A tokenizer whose tokens are single characters, ids their code points; two spaces in a row are one token."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text.replace("  ", "\u2003")]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids)).replace("\u2003", "  ")


def transcript_of(*events: object, done: bool = True) -> Transcript:
    data = [event if isinstance(event, str) else json.dumps(event) for event in events] + (["[DONE]"] if done else [])
    return read_transcript([(at * MS, f"data: {each}\n\n".encode()) for at, each in enumerate(data)])


def completion(text: str, ids: list[int] | None = None, finish: str | None = None, **more: object) -> Json:
    choice: Json = {"index": 0, "text": text, "finish_reason": finish}
    if ids is not None:
        choice["token_ids"] = ids
    return {"choices": [choice], **more}


def chat(delta: Json, **more: object) -> Json:
    return {"choices": [{"index": 0, "delta": delta, **more}]}


def usage(completion_tokens: int, prompt_tokens: int = 3, cached: int | None = None) -> Json:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, **details}


def reasons(transcript: Transcript, **request: object) -> list[str]:
    asked = {"prompt_ids": (1, 2, 3), "max_tokens": 2, **request}
    counts = count_tokens(transcript)
    return list(problems(CompletionRequest(**asked), transcript, counts, LimitsConfig(), None))  # type: ignore[arg-type]


def test_the_shape_of_vllm() -> None:
    transcript = transcript_of(
        {"choices": [{"index": 0, "text": "a", "token_ids": [7], "prompt_token_ids": [1, 2, 3], "stop_reason": None}]},
        completion("b", [8], "length"),
        {"choices": [], "usage": usage(2)},
    )
    counts = count_tokens(transcript)
    assert counts.events == (
        TokenEvent(t_ns=0, token_ids=(7,), text="a"),
        TokenEvent(t_ns=MS, token_ids=(8,), text="b"),
    )
    assert counts.counted_by is CountedBy.IDS
    assert reasons(transcript) == []


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", "content"])
def test_every_name_of_a_chat_delta_is_text(key: str) -> None:
    transcript = transcript_of(
        chat({"role": "assistant", "content": ""}),
        chat({key: "a"}),
        chat({key: "b"}, finish_reason="length"),
        {"choices": [], "usage": usage(2)},
    )
    counts = count_tokens(transcript)
    assert [(event.t_ns, event.text) for event in counts.events] == [(MS, "a"), (2 * MS, "b")]
    assert counts.counted_by is CountedBy.ONE_PER_EVENT


def test_a_reasoning_text_under_both_names_counts_once() -> None:
    transcript = transcript_of(chat({"reasoning": "a", "reasoning_content": "a"}), {"choices": [], "usage": usage(1)})
    assert [event.text for event in count_tokens(transcript).events] == ["a"]


def test_tool_call_arguments_are_text() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    transcript = transcript_of(chat({"tool_calls": [call]}), {"choices": [], "usage": usage(1)})
    assert [event.text for event in count_tokens(transcript).events] == ["f{}"]


def test_text_held_back_joins_the_ids_it_belongs_to() -> None:
    transcript = transcript_of(
        completion("", [1, 2]), completion("é", [3]), completion("!", [], "stop"), {"choices": [], "usage": usage(3)}
    )
    events = count_tokens(transcript).events
    assert [(event.token_ids, event.text) for event in events] == [((1, 2), ""), ((3,), "é!")]


def test_an_event_without_ids_among_events_with_ids_voids() -> None:
    transcript = transcript_of(completion("a", [1]), completion("b"), {"choices": [], "usage": usage(2)})
    assert "no ids" in reasons(transcript)[0]


def test_a_hundred_single_spaces_without_ids_are_a_hundred_tokens() -> None:
    running = [completion(" ", usage=usage(n + 1)) for n in range(100)]
    counts = count_tokens(transcript_of(*running), Letters())
    assert sum(event.num_tokens for event in counts.events) == 100
    assert counts.counted_by is CountedBy.RUNNING_USAGE


def test_a_tokenizer_counts_only_where_usage_confirms_it() -> None:
    events = [completion("ab"), completion("c", finish="length")]
    confirmed = count_tokens(transcript_of(*events, {"choices": [], "usage": usage(3)}), Letters())
    assert [event.token_ids for event in confirmed.events] == [(97, 98), (99,)]
    assert confirmed.counted_by is CountedBy.TOKENIZER
    refused = count_tokens(transcript_of(*events, {"choices": [], "usage": usage(4)}), Letters())
    assert refused.problem == "the text encodes to 3 tokens, the server counted 4"


@given(st.lists(st.integers(1, 6), min_size=1, max_size=40))
def test_running_usage_gives_each_event_its_own_count(sizes: list[int]) -> None:
    totals = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    counts = count_tokens(transcript_of(*(completion("x", usage=usage(total)) for total in totals)))
    assert [event.num_tokens for event in counts.events] == sizes


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([completion("a", [1]), {"error": {"message": "out of memory"}}], "out of memory"),
        ([completion("a", [1]), {"error": "plain words"}], "plain words"),
        ([completion("a", [1]), {"object": "error", "message": "old shape"}], "old shape"),
        ([completion("a", [1]), {"choices": [{"finish_reason": "abort"}]}], "abort"),
        ([completion("a", [1], "stop"), {"choices": [], "usage": usage(2)}], "usage says 2 tokens, 1 came"),
        ([completion("a", [1, 2, 3], "stop"), {"choices": [], "usage": usage(3)}], "3 tokens came where 2"),
        ([completion("a", [1]), {"choices": [], "usage": usage(1)}], "without a finish reason after 1 of 2"),
        ([completion("a", [1], "stop"), {"choices": [], "usage": usage(1, 4)}], "counted 4 prompt tokens where 3"),
        ([completion("a", [1], "stop"), {"choices": [], "usage": usage(1, 3, 2)}], "reused 2 cached"),
        ([completion("a", [1], "stop")], "confirms no prompt length"),
        ([completion("a", [1], "stop", usage=usage(1), prompt_token_ids=[1, 2, 9])], "other prompt ids"),
        ([completion("a", [-1], "stop")], "not an id"),
        ([completion("a", [True], "stop")], "not an id"),
        ([{"choices": [{"text": "a"}, {"text": "b"}]}], "2 choices"),
        ([{"choices": "none"}], "not a list"),
        (["[1, 2]"], "not a JSON object"),
        (["{"], "not JSON"),
    ],
)
def test_what_voids_a_stream(events: list[object], reason: str) -> None:
    assert reason in reasons(transcript_of(*events))[0]


KEYS = ["choices", "delta", "text", "content", "token_ids", "usage", "completion_tokens", "error", "finish_reason"]
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(ANY_JSON, max_size=4))
def test_no_event_of_any_shape_does_more_than_void_the_stream(events: list[object]) -> None:
    reasons(transcript_of(*events))


@pytest.mark.parametrize("data", ["[" * 100_000, '{"choices":[{"text":"\\ud800"}]}', "\x00"])
def test_data_that_parsers_dislike_is_not_json(data: str) -> None:
    assert "not JSON" in reasons(transcript_of(data))[0]


def test_empty_data_is_a_sign_of_life() -> None:
    assert reasons(transcript_of("", completion("a", [1], "stop"), "", {"choices": [], "usage": usage(1)})) == []


def test_a_short_answer_is_not_void() -> None:
    assert reasons(transcript_of(completion("a", [1], "stop"), {"choices": [], "usage": usage(1)})) == []


@given(st.lists(st.integers(0, 3000), min_size=2, max_size=12))
def test_only_a_gap_between_tokens_above_the_limit_is_a_stall(gaps_ms: list[int]) -> None:
    times = [sum(gaps_ms[:i]) * MS for i in range(len(gaps_ms) + 1)]
    pieces = [(t, f"data: {json.dumps(completion('a', [n]))}\n\n".encode()) for n, t in enumerate(times)]
    pieces.append((times[-1], f"data: {json.dumps({'choices': [], 'usage': usage(len(times))})}\n\n".encode()))
    transcript = read_transcript(pieces)
    request = CompletionRequest(prompt_ids=(1, 2, 3), max_tokens=len(times))
    found = list(problems(request, transcript, count_tokens(transcript), LimitsConfig(stall_s=2.0), None))
    assert bool(found) is (max(gaps_ms) > 2000)


def test_text_and_ids_must_agree() -> None:
    events = (TokenEvent(t_ns=0, token_ids=(97, 98), text="ab"), TokenEvent(t_ns=1, token_ids=(99,), text="d"))
    assert text_problem(events, Letters()) == "text and ids disagree from character 2: streamed 'd', the ids say 'c'"
    assert text_problem(events[:1], Letters()) is None


@pytest.mark.parametrize(
    ("decoded", "streamed", "agree"),
    [
        ("a\ufffdb\ufffd", "ab", True),
        ("\ufffd\ufffdb", "éb", True),
        ("\ufffdb", "éxb", False),
        ("ab", "éab", False),
        ("a b", "ab", False),
    ],
    ids=["held-back", "ends-the-prompts-character", "more-than-a-character", "no-character-open", "lost-space"],
)
def test_bytes_that_are_no_character_are_not_compared(decoded: str, streamed: str, agree: bool) -> None:
    events = (TokenEvent(t_ns=0, token_ids=tuple(map(ord, decoded)), text=streamed),)
    assert (text_problem(events, Letters()) is None) is agree


@given(st.lists(st.integers(0, 5), max_size=80), st.integers(1, 32), st.integers(4, 40))
def test_a_loop_that_is_most_of_the_output_is_found(before: list[int], period: int, repeats: int) -> None:
    looped = [100 + i for i in range(period)] * repeats
    loop = find_repetition_loop([*before, *looped])
    if len(looped) >= max(32, (len(before) + len(looped)) / 2):
        assert loop is not None
        assert loop.length >= len(looped)


@given(st.lists(st.integers(0, 10**6), max_size=300, unique=True))
def test_ids_that_never_repeat_are_no_loop(ids: list[int]) -> None:
    assert find_repetition_loop(ids) is None


def test_a_table_row_that_repeats_three_times_is_no_loop() -> None:
    assert find_repetition_loop([*range(20)] * 3) is None
    assert find_repetition_loop([*range(200), *([7] * 40)]) is None


@pytest.mark.parametrize(
    ("times_ms", "sizes", "most", "expected"),
    [
        ([0, 10, 20, 30], [1, 1, 1, 1], None, True),
        ([0, 10, 20, 30], [1, 4, 3, 2], 4, True),
        ([0, 10, 20, 30], [1, 4, 3, 2], 3, False),
        ([0, 10, 20, 30], [1, 2, 1, 1], None, False),
        ([0, 0, 20, 20, 40, 40], [1] * 6, None, False),
        ([0, 0, 20, 20, 40, 40], [1] * 6, 1, True),
        ([0, 10, 20, 20, 30, 40], [1] * 6, None, True),
    ],
    ids=["single", "speculative", "more-than-a-step", "unknown-limit", "bursts", "late-reader", "one-late-stamp"],
)
def test_which_events_are_steps(times_ms: list[int], sizes: list[int], most: int | None, expected: bool) -> None:
    events = [TokenEvent(t_ns=t * MS, token_ids=(5,) * n) for t, n in zip(times_ms, sizes, strict=True)]
    assert events_are_steps(events, most) is expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"detail": "nope"}', "nope"),
        (b"<html>502</html>", "<html>502</html>"),
    ],
)
def test_the_message_of_an_error_answer(body: bytes, message: str) -> None:
    assert error_message(body) == message
