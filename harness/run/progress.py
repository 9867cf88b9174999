"""What a run tells while it measures, and how long it will still take."""

from collections import defaultdict
from collections.abc import Iterable

from .records import StreamRecord
from .schedule import Slot


class RunObserver:
    """Told of everything that happens; does nothing. Override what you show."""

    def notify(self, message: str) -> None:
        """One line about something slow or unusual."""

    def launch_begins(self, launch: int, slots: list[Slot]) -> None:
        """The streams of this launch that are still to be measured, in order."""

    def engine_starting(self, build: str, launch: int, elapsed_s: float, log_line: str) -> None:
        """Several times a second while an engine starts; log_line is the last it wrote."""

    def engine_ready(self, build: str, launch: int, ready_s: float) -> None:
        """It answers."""

    def warming_up(self, build: str, launch: int, depth: int) -> None:
        """Before each warm-up request."""

    def stream_begins(self, slot: Slot, launch: int) -> None:
        """Before each measured stream. Nothing of an observer may run while the stream is read: no thread, no timer."""

    def stream_done(self, stream: StreamRecord) -> None:
        """After each measured stream, recorded already."""


class TimeLeft:
    """Estimates the time that slots will take from the streams seen so far, by build and depth."""

    def __init__(self) -> None:
        self._measured: dict[tuple[str, int], list[float]] = defaultdict(list)
        self._warm_ups: dict[tuple[str, int], list[float]] = defaultdict(list)

    def add(self, stream: StreamRecord) -> None:
        """Learns from a finished stream."""
        seen = self._warm_ups if stream.is_warmup else self._measured
        seen[stream.build, stream.depth].append((stream.ended_ns - stream.sent_ns) / 1e9)

    def seconds(self, slots: Iterable[Slot]) -> float | None:
        """For these slots; None until some stream of the depth has been seen for each."""
        total = 0.0
        for slot in slots:
            estimate = self._one(slot)
            if estimate is None:
                return None
            total += estimate
        return total

    def _one(self, slot: Slot) -> float | None:
        """The mean of the build's streams at the depth, or what the slowest other build takes there.

        A warm-up, in which an engine may compile for minutes, counts only until a stream was measured. From one depth
        nothing follows for another: a prompt takes neither the same time nor one in proportion.
        """
        for seen in (self._measured, self._warm_ups):
            if same := seen.get((slot.build, slot.depth)):
                return sum(same) / len(same)
        others = [
            sum(seconds) / len(seconds)
            for seen in (self._measured, self._warm_ups)
            for (_, depth), seconds in seen.items()
            if depth == slot.depth
        ]
        return max(others, default=None)
