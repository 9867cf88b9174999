"""The soak's own rule: what grows is named, what stays is not, and every kind of step is warmed up."""

from kernarc.decoder.bench.soak import DRAFTS, PROMPTS, RSS_SLACK_BYTES, Memory, growth, soak


class Leaky:
    """A session that keeps `leak` bytes a step."""

    def __init__(self, leak: int) -> None:
        self.leak, self.held, self.steps = leak, 1000, 0
        self.seen: set[tuple[int, int]] = set()
        self.prompt = 0

    def prefill(self, prompt_ids: list[int]) -> int:
        self.prompt = len(prompt_ids)
        return 0

    def step(self, num_drafts: int) -> tuple[list[int], int]:
        self.steps += 1
        self.seen.add((self.prompt, num_drafts))
        self.held += self.leak
        return [0], 0


def run(leak: int) -> list[tuple[int, Memory]]:
    session = Leaky(leak)
    measured = []
    for done, memory in soak(session, 1000, lambda: Memory(session.held, 5000, 70)):
        if done == 0:
            assert session.seen == {(prompt, drafts) for prompt in PROMPTS for drafts in DRAFTS}
        measured.append((done, memory))
    return measured


def test_a_leak_is_named_with_its_size() -> None:
    measured = run(leak=8)
    assert [done for done, _ in measured] == [0, *range(100, 1001, 100)]
    assert growth(measured[0][1], measured[-1][1]) == "allocated on the card by 8,000 bytes"


def test_nothing_grows_without_one() -> None:
    measured = run(leak=0)
    assert growth(measured[0][1], measured[-1][1]) is None


def test_the_process_may_settle_but_not_grow() -> None:
    before = Memory(10, 20, 1 << 30)
    assert growth(before, Memory(10, 20, (1 << 30) + RSS_SLACK_BYTES)) is None
    assert growth(before, Memory(10, 25, (1 << 30) + RSS_SLACK_BYTES + 1)) == (
        f"reserved on the card by 5 bytes, the process by {RSS_SLACK_BYTES + 1:,} bytes"
    )
