"""Cases about what a token is, when the first one came, and who counted them."""

from .case import Case
from .shape import Shape, UsageAt, Words


def _chunks(size: int) -> Case:
    return Case(
        f"chunks-{size}",
        f"{size} tokens an event: the same time per token as with one",
        Shape(tokens=256, ms_per_token=4.0, sizes=(size,)),
        threads="llama-benchy#11, sglang#12064",
        knows_steps=size == 1,
    )


COUNTING = (
    *(_chunks(size) for size in range(1, 17)),
    Case(
        "mixed-steps",
        "speculative steps of 4, 1, 3, 2 tokens: step time and tokens a step",
        Shape(tokens=256, step_ms=10.0, sizes=(4, 1, 3, 2)),
        threads="sglang#12064",
        max_tokens_per_step=4,
    ),
    Case(
        "first-chunk-of-5",
        "a first event of 5 tokens: 5 leave the denominator, not 1",
        Shape(tokens=101, ms_per_token=5.0, first_size=5),
        threads="aiperf#1279",
        knows_steps=False,
    ),
    Case(
        "two-tokens",
        "a reply of two tokens is one interval",
        Shape(tokens=2, ms_per_token=200.0, first_token_ms=100.0),
        threads="vllm#7242",
    ),
    Case(
        "single-spaces",
        "100 single-space tokens are 100 tokens",
        Shape(tokens=100, words=Words.SPACES),
        threads="vllm#12288",
        void_on_repetition=False,
    ),
    Case(
        "eos-at-100",
        "the end at 100 of 512 tokens, usage in a chunk without text: 100 tokens",
        Shape(tokens=100),
        threads="sglang#24254",
        max_tokens=512,
        ignore_eos=False,
    ),
    Case(
        "held-back-text",
        "ids come with the step, their text one event later: the ids are the tokens",
        Shape(tokens=64, holds_text_back=True, words=Words.UNICODE),
    ),
    Case(
        "ids-so-far",
        "every event repeats the ids before it: no more tokens than there are",
        Shape(repeats_ids=True),
        void="usage says",
    ),
    Case(
        "too-many-tokens", "more tokens than were asked for", Shape(ignores_cap=True), max_tokens=40, void="asked for"
    ),
    Case("no-tokens", "a stream that ends at once", Shape(tokens=0), max_tokens=16, void="no tokens"),
    Case(
        "repetition-loop",
        "a loop of 3 tokens is degenerate output",
        Shape(tokens=128, loop_period=3),
        threads="model-serving-minefield#108",
        void="degenerate",
    ),
)

FIRST_TOKEN = (
    Case(
        "slow-first-token",
        "10 s to the first token, then 5 ms a token: 5.0 ms",
        Shape(tokens=256, ms_per_token=5.0, first_token_ms=10_000.0),
        threads="llmperf#99, inference-perf#410, guidellm#1144",
    ),
    Case(
        "role-chunk",
        "a role-only chunk at 0 and the first token at 2 s: 2 s to the first token",
        Shape(tokens=64, first_token_ms=2000.0, is_chat=True),
        threads="PocketLLM#289",
    ),
    Case(
        "reasoning",
        "a stream of reasoning only, under the key `reasoning`",
        Shape(is_chat=True, text_key="reasoning"),
        threads="guidellm#737, inference-perf#559",
    ),
    Case(
        "reasoning-content",
        "a stream of reasoning only, under the key `reasoning_content`",
        Shape(is_chat=True, text_key="reasoning_content"),
        threads="guidellm#737, inference-perf#559",
    ),
    Case(
        "late-ending",
        "finish reason and usage come 300 ms after the last token: no part of the time per token",
        Shape(ending_ms=300.0),
    ),
    Case(
        "first-20-held-back",
        "a proxy holds the first 20 events and sends them together: 20 leave the denominator, not 1",
        Shape(tokens=256, ms_per_token=4.0, held_back_events=20),
        max_tokens_per_step=None,
        knows_steps=False,
    ),
    Case(
        "all-held-back",
        "a proxy holds the whole stream and sends it at once: no time per token, not an endless speed",
        Shape(held_back_events=64, flush_in_one_write=True),
        void="held back",
    ),
    Case(
        "flush-20-as-one-event",
        "20 tokens an event, sent together: time per token right, steps unknown",
        Shape(tokens=256, ms_per_token=4.0, sizes=(20,)),
        threads="TensorRT-LLM#18432",
        max_tokens_per_step=None,
        knows_steps=False,
    ),
    Case(
        "flush-20-in-one-write",
        "20 events in one write, every 20 tokens",
        Shape(tokens=256, ms_per_token=4.0, flush_events=20, flush_in_one_write=True),
        threads="TensorRT-LLM#18432",
        max_tokens_per_step=None,
        knows_steps=False,
    ),
    Case(
        "flush-20-in-20-writes",
        "20 events in 20 writes at once, every 20 tokens",
        Shape(tokens=256, ms_per_token=4.0, flush_events=20),
        threads="TensorRT-LLM#18432",
        max_tokens_per_step=None,
        knows_steps=False,
    ),
)

USAGE = (
    Case("usage-beside", "usage beside the last choices", Shape(usage=UsageAt.BESIDE), threads="(read in code)"),
    Case("usage-every-chunk", "usage in every chunk", Shape(usage=UsageAt.EVERY)),
    Case("usage-prompt-first", "the prompt's count first, the rest at the end", Shape(usage=UsageAt.PROMPT_FIRST)),
    Case("usage-after-done", "usage after [DONE]", Shape(usage=UsageAt.AFTER_DONE)),
    Case("usage-never", "no usage, but the prompt's ids come back: ids count", Shape(usage=UsageAt.NEVER)),
    Case(
        "depth-unconfirmed",
        "neither usage nor the prompt's ids: nobody confirms the depth",
        Shape(usage=UsageAt.NEVER, sends_prompt_ids=False),
        void="confirms no prompt length",
    ),
    Case("usage-lies", "usage counts one token more than came", Shape(completion_count_off=1), void="usage says"),
    Case(
        "prompt-count-off",
        "the server counts one prompt token more (a BOS nobody sent)",
        Shape(prompt_count_off=1),
        threads="vllm#17408, sglang#15732",
        void="prompt tokens",
    ),
    Case("cached-prefix", "the server reused cached tokens", Shape(cached_tokens=16), void="cached"),
    Case("cached-none", "the server says 0 cached tokens", Shape(cached_tokens=0)),
    *(
        Case(
            f"cached-{name}",
            f"the server reused cached tokens and says so as {'.'.join(path)}",
            Shape(cached_tokens=16, cached_field=path),
            void="cached",
        )
        for name, path in (
            ("llama-cpp", ("timings", "cache_n")),
            ("deepseek", ("usage", "prompt_cache_hit_tokens")),
            ("moonshot", ("usage", "cached_tokens")),
            ("litellm", ("usage", "cache_read_input_tokens")),
            ("input-details", ("usage", "input_tokens_details", "cached_tokens")),
            ("sglang-native", ("meta_info", "cached_tokens")),
        )
    ),
    Case(
        "same-prompt-twice",
        "the second time the prompt is in the server's cache",
        Shape(first_token_ms=200.0),
        threads="vllm#54227, vllm#52884",
        requests=2,
        caches_prompts=True,
        void="cached",
    ),
    Case(
        "no-ids-running-usage",
        "no ids, running usage: exact counts for 1 to 4 tokens an event",
        Shape(sends_ids=False, usage=UsageAt.EVERY, sizes=(2, 1, 4)),
        max_tokens_per_step=4,
    ),
    Case("no-ids-one-per-event", "no ids, usage equals the number of events", Shape(sends_ids=False)),
    Case(
        "no-ids-uncountable",
        "no ids, several tokens an event, usage only at the end",
        Shape(sends_ids=False, sizes=(2, 1, 4)),
        void="cannot be counted",
    ),
    Case(
        "chat-template",
        "the template makes 4,096 tokens 4,109: measured and trimmed",
        Shape(is_chat=True),
        threads="tt-inference-server#4179",
        prompt_tokens=4096,
    ),
    Case(
        "chat-template-unmeasured",
        "the same without /tokenize: the prompt cannot be trimmed",
        Shape(is_chat=True, has_tokenize=False),
        threads="tt-inference-server#4179",
        prompt_tokens=4096,
        void="4109 prompt tokens",
    ),
)
