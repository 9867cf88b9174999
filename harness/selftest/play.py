"""Playing one case of the conformance suite with the project's own client."""

import random
from dataclasses import dataclass
from socket import create_connection
from time import perf_counter_ns, sleep, thread_time_ns
from urllib.parse import urlsplit

from ..client.chat_prompt import fit_chat_prompt
from ..client.client import StreamingClient
from ..client.completion import ChatMessage, CompletionRequest, StreamOutcome
from ..client.request_bytes import completion_payload, http_post
from ..client.socket_reader import RECV_BYTES
from ..client.timestamps import StampedBy
from ..config.models import LimitsConfig
from ..errors import VoidMeasurementError
from .conformance.case import Case
from .conformance.cases import DEEP_PROMPT_TOKENS, TIMING
from .conformance.process import ConformanceServer
from .conformance.truth import Truth


@dataclass(frozen=True)
class Played:
    """One run of a case: the request, its outcomes in order, and what the server did for each that reached it."""

    request: CompletionRequest
    outcomes: tuple[StreamOutcome, ...]
    truths: tuple[Truth, ...]
    bare_recv_ns: int | None = None


def play(server: ConformanceServer, case: Case, attempt: int, stamped_by: StampedBy = StampedBy.KERNEL) -> Played:
    """Sends the case's requests over one client."""
    limits = LimitsConfig(
        first_token_s=case.first_token_limit_s,
        first_token_s_per_1k_tokens=0.0,
        stall_s=case.stall_limit_s,
        stream_s=case.stream_limit_s,
    )
    server.new_truths()  # what others played on it before
    outcomes: list[StreamOutcome] = []
    with StreamingClient(server.url(case.name), limits, stamped_by=stamped_by, busy_wait_s=0.1) as client:
        request = _request(client, case, attempt)
        for number in range(case.requests):
            if number:
                sleep(case.pause_s)
            outcomes.append(client.complete(request))
    truths = tuple(server.new_truths())
    times_bare_recv = case in TIMING and case.prompt_tokens < DEEP_PROMPT_TOKENS
    bare_recv_ns = _bare_recv_ns(server, request) if times_bare_recv else None
    return Played(request, tuple(outcomes), truths, bare_recv_ns)


def _bare_recv_ns(server: ConformanceServer, request: CompletionRequest) -> int:
    """CPU time of a thread that receives the request's stream, stamps each piece and does nothing else."""
    path, body = completion_payload(request, ())
    url = urlsplit(server.url(request.model))
    with create_connection((url.hostname or "", url.port or 0)) as connection:
        connection.sendall(http_post(url.netloc, url.path + path, body, None))
        start_ns = thread_time_ns()
        while not connection.recv(RECV_BYTES).endswith(b"0\r\n\r\n"):
            perf_counter_ns()
        return thread_time_ns() - start_ns


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
