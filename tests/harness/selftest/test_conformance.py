"""The conformance server plays what its cases say, at the times they say, and the client is right on every one."""

import json
import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernarc.harness.client.http import ResponseReader
from kernarc.harness.selftest.checks import case_row
from kernarc.harness.selftest.conformance.cases import CASES, TIMING
from kernarc.harness.selftest.conformance.process import ConformanceServer
from kernarc.harness.selftest.conformance.render import Asked, render
from kernarc.harness.selftest.conformance.shape import Cut, Framing, Shape, UsageAt, Words
from kernarc.harness.selftest.conformance.tcp_writes import Write, cut_into_writes
from kernarc.harness.selftest.play import play
from kernarc.harness.selftest.table import CaseRow

TOO_LONG_FOR_A_TEST = {"slow-first-token", *(f"chunks-{n}" for n in range(3, 16) if n != 8)}
PLAYED = [name for name, case in CASES.items() if case not in TIMING and name not in TOO_LONG_FOR_A_TEST]

LATE = 0.01  # that late stamps may move a rate by on a busy machine, in the best of ATTEMPTS
ATTEMPTS = 8


def rate_error(row: CaseRow) -> float:
    """How far the measured rates are off, as a fraction; 0 for what passed, infinite for what is wrong but for time."""
    if row.passed:
        return 0.0
    if not row.missed_by_time_alone or row.truth.ttft_ms is None or row.measured.ttft_ms is None:
        return math.inf
    if abs(row.truth.ttft_ms - row.measured.ttft_ms) >= 50:
        return math.inf
    pairs = [(row.truth.tpot_ms, row.measured.tpot_ms), (row.truth.step_ms, row.measured.step_ms)]
    errors = [
        abs(measured / true - 1) if true and measured else math.inf for true, measured in pairs if true is not measured
    ]
    return max(errors, default=0.0)


@pytest.mark.parametrize("name", PLAYED)
def test_the_client_is_right_on(name: str, conformance_server: ConformanceServer) -> None:
    """Judged by the server's log. Other processes make single stamps late, a wrong client is wrong every time."""
    case = CASES[name]
    rows = []
    for attempt in range(1, ATTEMPTS + 1):
        rows.append(case_row(case, play(conformance_server, case, attempt), attempt))
        if rows[-1].passed or not rows[-1].missed_by_time_alone:
            break
    assert min(map(rate_error, rows)) < LATE, rows[-1].mismatches


THREADS = (
    "llama-benchy#11",
    "sglang#12064",
    "llmperf#99",
    "inference-perf#410",
    "aiperf#1279",
    "sglang#24254",
    "vllm#12288",
    "guidellm#1144",
    "guidellm#737",
    "inference-perf#559",
    "PocketLLM#289",
    "vllm#57519",
    "sglang#38868",
    "vllm#51030",
    "tokenspeed#134",
    "mstar#194",
    "vllm#17408",
    "sglang#15732",
    "tt-inference-server#4179",
    "vllm#54227",
    "vllm#52884",
    "vllm#21981",
    "tt-studio#952",
    "vllm#7242",
    "model-serving-minefield#108",
    "TensorRT-LLM#18432",
)


def test_every_thread_of_the_list_of_faults_that_a_client_can_meet_has_a_case() -> None:
    covered = " ".join(case.threads for case in CASES.values())
    for thread in THREADS:
        assert thread in covered


SHAPES = st.builds(
    Shape,
    tokens=st.integers(1, 20),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    first_size=st.one_of(st.none(), st.integers(1, 5)),
    flush_events=st.integers(1, 4),
    flush_in_one_write=st.booleans(),
    words=st.sampled_from(Words),
    usage=st.sampled_from(UsageAt),
    cut=st.sampled_from(Cut),
    framing=st.sampled_from(Framing),
    line_end=st.sampled_from(["\n", "\r\n", "\r"]),
    comments=st.booleans(),
    is_chat=st.booleans(),
)


@given(SHAPES, st.integers(1, 20))
def test_any_shape_is_a_whole_answer_with_all_its_tokens_in_order_of_time(shape: Shape, max_tokens: int) -> None:
    asked = Asked(prompt_tokens=3, max_tokens=max_tokens, is_chat=shape.is_chat, wants_ids=True, wants_usage=True)
    writes = render(shape, asked)
    reader = ResponseReader()
    for write in writes:
        reader.feed(write.data)
    if shape.framing is Framing.CLOSE:
        reader.end_of_connection()
    assert reader.complete
    assert reader.leftover == b""
    assert sum(write.tokens for write in writes) == min(shape.tokens, max_tokens)
    timed = [write.due_ms for write in writes if write.tokens]
    assert timed == sorted(timed)


@pytest.mark.parametrize("cut", Cut)
@pytest.mark.parametrize("framing", Framing)
def test_cutting_keeps_every_byte(cut: Cut, framing: Framing) -> None:
    events = [Write(float(n), f"data: é{n}\n\n".encode(), n) for n in range(5)]
    writes = list(cut_into_writes(Shape(cut=cut, framing=framing), events))
    reader = ResponseReader()
    reader.feed(
        b"HTTP/1.1 200 OK\r\n" + (b"transfer-encoding: chunked\r\n\r\n" if framing is Framing.CHUNKED else b"\r\n")
    )
    assert b"".join(reader.feed(write.data) for write in writes) == b"".join(event.data for event in events)
    assert sum(write.tokens for write in writes) == 10


def post(url: str, payload: object) -> bytes:
    request = Request(url, json.dumps(payload).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=10) as answer:
        body: bytes = answer.read()
    return body


def test_another_client_finds_the_case_by_model_and_the_truth_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "truth.jsonl"
    command = [
        sys.executable,
        "-m",
        "kernarc.harness.selftest.conformance",
        "--case",
        "chunks-16",
        "--truth-log",
        str(log),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[1]
        by_model = post(f"{url}/v1/completions", {"model": "two-tokens", "prompt": "a b c", "max_tokens": 2})
        default = post(f"{url}/v1/completions", {"prompt": [1, 2], "max_tokens": 16})
        with pytest.raises(HTTPError, match="400"):
            post(f"{url}/v1/completions", {"prompt": [1], "max_tokens": 0})
        with pytest.raises(HTTPError, match="404"):
            post(f"{url}/v2/completions", {})
        with urlopen(f"{url}/cases", timeout=10) as answer:
            assert {case["name"] for case in json.load(answer)} == set(CASES)
    finally:
        process.terminate()
        process.wait(timeout=10)
    assert by_model.count(b"data: ") == 3
    assert default.count(b"data: ") == 2
    first, second = (json.loads(line) for line in log.read_text().splitlines())
    assert (first["case"], first["prompt_tokens"], first["tokens"]) == ("two-tokens", 3, 2)
    assert (second["case"], second["prompt_tokens"], second["tokens"]) == ("chunks-16", 2, 16)


def test_writes_are_never_early(conformance_server: ConformanceServer) -> None:
    play(conformance_server, CASES["mixed-steps"], 1)
    post(conformance_server.url("mixed-steps") + "/v1/completions", {"prompt": [1], "max_tokens": 40})
    (truth,) = conformance_server.new_truths()
    due = [event.due_ns for event in truth.events]
    assert [event.tokens for event in truth.events] == [4, 1, 3, 2] * 4
    assert {later - earlier for earlier, later in pairwise(due)} == {10_000_000}
    assert min(truth.jitter_ms()) >= 0.0
