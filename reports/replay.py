"""Detail B: one recorded stream per depth and build, with the times and the text as they arrived."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..harness import format as fmt
from ..harness.client.metrics import tpot_ms, ttft_ms
from ..harness.run.records import StreamRecord, TokenEvent
from .saved import SavedRun, ok_streams
from .tables import Column, SpeedTable

TICKS_PER_MS = 10  # times travel as whole tenths of a millisecond
MAX_DATA_BYTES = 500_000  # keeps the page below 1.5 MB whatever was measured

Json = dict[str, object]


@dataclass(frozen=True)
class Lane:
    """One build's stream at one depth; stream None where `reason` says why there is nothing to replay.

    most_events: the replay ends there, so that very long outputs fit into the page; None for all of them.
    """

    column: Column
    stream: StreamRecord | None
    reason: str | None = None
    most_events: int | None = None

    @property
    def events(self) -> tuple[TokenEvent, ...]:
        """The events that are replayed."""
        return () if self.stream is None else self.stream.events[: self.most_events]

    @property
    def is_cut(self) -> bool:
        """True where the stream went on after the replay's end."""
        return self.stream is not None and len(self.events) < len(self.stream.events)

    @property
    def shows_ids(self) -> bool:
        """True where the server sent no text: the checkpoint has no tokenizer, so its ids are shown."""
        return self.stream is not None and not self.stream.text

    @property
    def pieces(self) -> tuple[str, ...]:
        """What each event adds to the text: its recorded text, or its ids."""
        if self.shows_ids:
            return tuple("".join(f"{token} " for token in event.token_ids) for event in self.events)
        return tuple(event.text for event in self.events)

    @property
    def tokens(self) -> int:
        """Tokens on show at the end."""
        return sum(len(event.token_ids) for event in self.events)

    @property
    def decode_ms(self) -> float:
        """From the first token to the last one shown."""
        return (self.events[-1].t_ns - self.events[0].t_ns) / 1e6 if self.events else 0.0

    @property
    def tokens_in_last_second(self) -> int:
        """Tokens that arrived within the second that ends with the last one shown."""
        if not self.events:
            return 0
        since = self.events[-1].t_ns - 1_000_000_000
        return sum(len(event.token_ids) for event in self.events if event.t_ns > since)


@dataclass(frozen=True)
class Race:
    """All lanes of one depth; the same request in every lane of one run."""

    depth: int
    lanes: tuple[Lane, ...]

    def cut_to(self, most_events: int) -> "Race":
        """The same race, ending after so many events of each lane."""
        return Race(self.depth, tuple(replace(lane, most_events=most_events) for lane in self.lanes))


def races(runs: Sequence[SavedRun], table: SpeedTable) -> tuple[Race, ...]:
    """One race a depth: in each run the request whose times lie nearest to the medians of its cells.

    Where long outputs would make the page too large, every lane ends after the same number of events.
    """
    result = []
    for depth in table.depths:
        lanes = [_lane(runs, table, column, depth) for column in table.columns if (column.key, depth) in table.cells]
        if any(lane.stream is not None for lane in lanes):
            result.append(Race(depth, tuple(lanes)))
    longest = max((len(lane.events) for race in result for lane in race.lanes), default=0)
    while longest > 1 and len(race_json(result).encode()) > MAX_DATA_BYTES:
        longest //= 2
        result = [race.cut_to(longest) for race in result]
    return tuple(result)


def race_json(found: Sequence[Race]) -> str:
    """The replay's data, safe inside a script element: no <, >, & or line separator survives unescaped."""
    document: Json = {
        "ticksPerMs": TICKS_PER_MS,
        "races": [
            {"depth": fmt.count(race.depth), "lanes": [_lane_data(lane) for lane in race.lanes]} for race in found
        ],
    }
    text = json.dumps(document, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _lane(runs: Sequence[SavedRun], table: SpeedTable, column: Column, depth: int) -> Lane:
    cell = table.cells[column.key, depth]
    if cell.tpot is None:
        return Lane(column, None, cell.void_reason)
    siblings = [each for each in table.columns if each.key.split(":")[0] == column.key.split(":")[0]]
    cells = [table.cells[each.key, depth] for each in siblings if table.cells[each.key, depth].tpot is not None]
    run = runs[int(column.key.split(":")[0])]
    distances: dict[str, float] = {}
    counts: dict[str, int] = {}
    for each in cells:
        for stream in ok_streams(run.cell_streams(each.column.build.name, depth)):
            tpot = tpot_ms(stream)
            if tpot and each.tpot_ms:
                counts[stream.request_id] = counts.get(stream.request_id, 0) + 1
                distance = abs(math.log(tpot / each.tpot_ms))
                distances[stream.request_id] = distances.get(stream.request_id, 0.0) + distance
    everywhere = [request for request, count in counts.items() if count == len(cells)] or list(counts)
    chosen = min(everywhere, key=lambda request: (round(distances[request], 12), request))
    streams = ok_streams(run.cell_streams(column.build.name, depth))
    return Lane(column, next((stream for stream in streams if stream.request_id == chosen), None), "not recorded")


def _lane_data(lane: Lane) -> Json:
    data: Json = {"label": lane.column.label}
    if lane.stream is None:
        return {**data, "reason": lane.reason or "not recorded"}
    first_ns = lane.stream.events[0].t_ns
    return {
        **data,
        "request": lane.stream.request_id,
        "median": fmt.milliseconds(tpot_ms(lane.stream)),
        "wait": _ticks((ttft_ms(lane.stream) or 0.0) * 1e6),
        "t": [_ticks(event.t_ns - first_ns) for event in lane.events],
        "n": [len(event.token_ids) for event in lane.events],
        "text": list(lane.pieces),
        "ids": lane.shows_ids,
        "cut": lane.is_cut,
    }


def _ticks(nanoseconds: float) -> int:
    return round(nanoseconds * TICKS_PER_MS / 1e6)
