"""Playing one case of the conformance suite with the project's own client."""

import random
from dataclasses import dataclass
from time import sleep

from .chat_prompt import fit_chat_prompt
from .client import StreamingClient
from .completion import ChatMessage, CompletionRequest, StreamOutcome
from .conformance.case import Case
from .conformance.process import ConformanceServer
from .conformance.truth import Truth
from .errors import VoidMeasurementError
from .reading import StreamLimits


@dataclass(frozen=True)
class Played:
    """One run of a case: the request, its outcomes in order, and what the server did for each that reached it."""

    request: CompletionRequest
    outcomes: tuple[StreamOutcome, ...]
    truths: tuple[Truth, ...]


def play(server: ConformanceServer, case: Case, attempt: int) -> Played:
    """Sends the case's requests over one client."""
    limits = StreamLimits(
        first_token_s=case.first_token_limit_s,
        first_token_ms_per_prompt_token=0.0,
        stall_s=case.stall_limit_s,
        stream_s=case.stream_limit_s,
        busy_wait_s=0.1,
    )
    server.new_truths()  # what others played on it before
    outcomes: list[StreamOutcome] = []
    with StreamingClient(server.url(case.name), limits) as client:
        request = _request(client, case, attempt)
        for number in range(case.requests):
            if number:
                sleep(case.pause_s)
            outcomes.append(client.complete(request))
    return Played(request, tuple(outcomes), tuple(server.new_truths()))


def _request(client: StreamingClient, case: Case, attempt: int) -> CompletionRequest:
    randomness = random.Random(f"{case.name} {attempt}")
    prompt_ids: tuple[int, ...] = tuple(randomness.randrange(1000) for _ in range(case.prompt_tokens))
    messages: tuple[ChatMessage, ...] = ()
    if case.shape.is_chat:
        text = " ".join(f"word{token}" for token in prompt_ids)
        try:
            messages = fit_chat_prompt(client, case.name, text, case.prompt_tokens)
        except VoidMeasurementError:
            messages = (ChatMessage("user", text),)  # sent as it is: the server's count must void it
        prompt_ids = ()
    return CompletionRequest(
        prompt_ids=prompt_ids,
        messages=messages,
        prompt_tokens=case.prompt_tokens,
        max_tokens=case.asked_tokens,
        model=case.name,
        ignore_eos=case.ignore_eos,
        max_tokens_per_step=case.max_tokens_per_step,
        void_on_repetition=case.void_on_repetition,
    )
