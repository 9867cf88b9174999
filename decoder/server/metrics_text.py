"""Counters of a running server in Prometheus' text format."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class ServerCounters:
    """Totals since the server started; written by the decoder's thread, read by anyone."""

    drafts: int = 0  # steps that verified at least one draft
    draft_tokens: int = 0
    accepted_tokens: int = 0  # drafts that were committed and sent, after every trim
    committed_tokens: int = 0  # every token sent
    prompt_tokens: int = 0
    requests: dict[str, int] = field(default_factory=dict)  # by how they ended
    running: int = 0
    waiting: int = 0

    def count_step(self, drafted: int, accepted: int, committed: int) -> None:
        """One decoder step as the client saw it."""
        self.drafts += drafted > 0
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self.committed_tokens += committed

    def count_request(self, ended: str) -> None:
        """One request that ended: stop, length, cancelled, error, refused."""
        self.requests[ended] = self.requests.get(ended, 0) + 1


def render(counters: ServerCounters) -> str:
    """The /metrics page."""
    lines: list[str] = []

    def add(name: str, kind: str, about: str, values: dict[str, int]) -> None:
        lines.extend((f"# HELP {name} {about}", f"# TYPE {name} {kind}"))
        lines.extend(f"{name}{labels} {value}" for labels, value in values.items())

    add("kernarc_drafts_total", "counter", "Steps that verified drafts.", {"": counters.drafts})
    add("kernarc_draft_tokens_total", "counter", "Draft tokens verified.", {"": counters.draft_tokens})
    add("kernarc_accepted_tokens_total", "counter", "Draft tokens committed.", {"": counters.accepted_tokens})
    add("kernarc_committed_tokens_total", "counter", "Tokens sent.", {"": counters.committed_tokens})
    add("kernarc_prompt_tokens_total", "counter", "Prompt tokens read.", {"": counters.prompt_tokens})
    add("kernarc_prefix_cache_queries_total", "counter", "There is no prefix cache.", {"": 0})
    add("kernarc_prefix_cache_hits_total", "counter", "There is no prefix cache.", {"": 0})
    ended = {f'{{ended="{name}"}}': count for name, count in sorted(counters.requests.items())}
    add("kernarc_requests_total", "counter", "Requests by how they ended.", ended)
    add("kernarc_requests_running", "gauge", "Requests being decoded, 0 or 1.", {"": counters.running})
    add("kernarc_requests_waiting", "gauge", "Requests in the queue.", {"": counters.waiting})
    return "\n".join(lines) + "\n"
