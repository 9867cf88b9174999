"""Cases about how bytes travel and how streams break."""

from .case import Case, Refusal
from .shape import Break, Cut, Framing, Shape, Words

BROKEN = (
    Case(
        "error-in-stream",
        "10 tokens, an error event, [DONE], all under HTTP 200",
        Shape(break_after=10, breaks=Break.ERROR_EVENT),
        threads="vllm#57519, sglang#38868",
        void="ran out of memory",
    ),
    Case(
        "stall",
        "one event, then silence",
        Shape(break_after=1, breaks=Break.STALL),
        threads="vllm#51030, tokenspeed#134",
        stall_limit_s=0.4,
        void="stalled",
    ),
    Case(
        "stall-with-pings",
        "one event, then comment lines only",
        Shape(break_after=1, breaks=Break.PINGS),
        threads="vllm#51030",
        stall_limit_s=0.4,
        void="stalled",
    ),
    Case(
        "stall-with-empty-events",
        "one event, then events without a token only",
        Shape(break_after=1, breaks=Break.EMPTY_EVENTS),
        threads="vllm#51030",
        stall_limit_s=0.4,
        void="stalled",
    ),
    Case(
        "stall-with-drip",
        "one event, then the next byte by byte, never whole",
        Shape(break_after=1, breaks=Break.DRIP),
        threads="vllm#51030",
        stall_limit_s=0.4,
        void="stalled",
    ),
    Case(
        "no-first-token",
        "the first token comes after the limit",
        Shape(first_token_ms=5000.0),
        threads="mstar#194",
        first_token_limit_s=0.4,
        void="no token within",
    ),
    Case(
        "slow-stream",
        "one arm is slower than the limit of the whole stream",
        Shape(tokens=100, ms_per_token=50.0),
        threads="mstar#194",
        stream_limit_s=0.6,
        void="whole stream",
    ),
    Case("close-mid-stream", "the connection closes", Shape(break_after=10, breaks=Break.CLOSE), void="closed"),
    Case("reset-mid-stream", "the connection is reset", Shape(break_after=10, breaks=Break.RESET), void="broke"),
    Case(
        "half-event", "the body ends inside an event", Shape(break_after=10, breaks=Break.HALF_EVENT), void="not JSON"
    ),
    Case("not-json", "an event that is not JSON", Shape(break_after=10, breaks=Break.NOT_JSON), void="not JSON"),
    Case(
        "failed-finish",
        'finish_reason "error" and no message',
        Shape(finish_reason="error"),
        void="finish_reason",
    ),
    Case(
        "http-400",
        "an HTTP error with a message",
        Shape(),
        refusals=(Refusal(400, "the prompt is longer than the window"),),
        void="longer than the window",
    ),
    Case(
        "busy-then-fine",
        "503, then fine: nothing was generated, so it may be asked again",
        Shape(),
        refusals=(Refusal(503, "loading"),),
    ),
    Case(
        "refused-field",
        "a server that does not know continuous_usage_stats",
        Shape(),
        refused_field="continuous_usage_stats",
    ),
)

WIRE = (
    Case("cut-characters", "TCP cuts inside a character", Shape(cut=Cut.INSIDE_CHUNK, words=Words.UNICODE)),
    Case("cut-json", "TCP cuts inside JSON: no space is lost", Shape(cut=Cut.INSIDE_CHUNK), threads="(read in code)"),
    Case("cut-into-chunks", "HTTP chunks end inside a character", Shape(cut=Cut.INTO_CHUNKS, words=Words.UNICODE)),
    Case(
        "shifted-writes", "each write ends one event and begins the next", Shape(cut=Cut.SHIFTED, words=Words.UNICODE)
    ),
    Case("single-bytes", "one byte a write", Shape(tokens=24, ms_per_token=20.0, cut=Cut.BYTES)),
    Case("crlf", "lines end in CRLF", Shape(line_end="\r\n"), threads="(read in code)"),
    Case("cr", "lines end in CR", Shape(line_end="\r")),
    Case("data-lines", "the JSON of an event over several data lines", Shape(splits_data=True)),
    Case("comments", "a comment line before every event", Shape(comments=True), threads="(read in code)"),
    Case("protocol-text", "texts that look like the protocol: [DONE], ids, chunk ends", Shape(words=Words.PROTOCOL)),
    Case("chunk-extras", "chunk extensions and a trailer", Shape(has_chunk_extras=True)),
    Case("interim-answer", "103 Early Hints before the answer", Shape(has_interim_answer=True)),
    Case("nagle", "a server without TCP_NODELAY, asked twice", Shape(no_delay=False), requests=2),
    Case("compressed", "a head that says gzip", Shape(content_encoding="gzip"), void="compressed"),
    Case("not-streamed", "one JSON answer", Shape(is_streamed=False), void="did not stream"),
    Case("content-length", "a body with a content-length", Shape(framing=Framing.LENGTH)),
    Case("until-close", "a body that ends with the connection", Shape(framing=Framing.CLOSE)),
    Case("no-done", "the body ends without [DONE]", Shape(says_done=False)),
    Case("open-after-done", "the body stays open after [DONE]", Shape(stays_open_after_done=True)),
    Case(
        "idle-close",
        "the server closes the idle connection: a new one, its cost outside the first token",
        Shape(first_token_ms=100.0),
        threads="vllm#21981, tt-studio#952",
        closes_after_answer=True,
        requests=2,
        pause_s=0.2,
    ),
    Case(
        "close-without-answer",
        "the server reads the request and closes: never sent twice",
        Shape(),
        threads="vllm#21981",
        closes_without_answer=True,
        void="without an answer",
    ),
)
