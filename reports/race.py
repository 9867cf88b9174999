"""Detail B: one recorded stream per depth and build, with the times and the text as they arrived."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..harness.metrics import tpot_ms, ttft_ms
from ..harness.records import StreamRecord
from . import format as fmt
from .saved import SavedRun, ok_streams
from .tables import Column, SpeedTable

TICKS_PER_MS = 10  # times travel as whole tenths of a millisecond
MAX_DATA_BYTES = 900_000  # keeps the page below 1.5 MB whatever was measured

Json = dict[str, object]


@dataclass(frozen=True)
class Lane:
    """One build's stream at one depth; stream None where `reason` says why there is nothing to replay."""

    column: Column
    stream: StreamRecord | None
    reason: str | None = None

    @property
    def shows_ids(self) -> bool:
        """True where the server sent no text: the checkpoint has no tokenizer, so its ids are shown."""
        return self.stream is not None and not self.stream.text

    @property
    def pieces(self) -> tuple[str, ...]:
        """What each event adds to the text: its recorded text, or its ids."""
        if self.stream is None:
            return ()
        if self.shows_ids:
            return tuple("".join(f"{token} " for token in event.token_ids) for event in self.stream.events)
        return tuple(event.text for event in self.stream.events)

    @property
    def decode_ms(self) -> float:
        """From the first token to the last."""
        return 0.0 if self.stream is None else (self.stream.events[-1].t_ns - self.stream.events[0].t_ns) / 1e6

    @property
    def tokens_in_last_second(self) -> int:
        """Tokens that arrived within the second that ends with the last one."""
        if self.stream is None:
            return 0
        since = self.stream.events[-1].t_ns - 1_000_000_000
        return sum(event.num_tokens for event in self.stream.events if event.t_ns > since)


@dataclass(frozen=True)
class Race:
    """All lanes of one depth; the same request in every lane of one run."""

    depth: int
    lanes: tuple[Lane, ...]


def races(runs: Sequence[SavedRun], table: SpeedTable) -> tuple[Race, ...]:
    """One race a depth: in each run the request whose times lie nearest to the medians of its cells."""
    result = []
    for depth in table.depths:
        lanes = [_lane(runs, table, column, depth) for column in table.columns if (column.key, depth) in table.cells]
        if any(lane.stream is not None for lane in lanes):
            result.append(Race(depth, tuple(lanes)))
    return tuple(result)


def race_json(found: Sequence[Race]) -> str:
    """The replay's data, safe inside a script element: no <, >, & or line separator survives unescaped.

    Where long outputs would make the page too large, every lane is cut after the same number of events.
    """
    longest = max((len(lane.pieces) for race in found for lane in race.lanes), default=0)
    text = _encode(found, longest)
    while len(text.encode()) > MAX_DATA_BYTES and longest > 1:
        longest //= 2
        text = _encode(found, longest)
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


def _encode(found: Sequence[Race], most_events: int) -> str:
    document: Json = {
        "ticksPerMs": TICKS_PER_MS,
        "races": [
            {"depth": fmt.count(race.depth), "lanes": [_lane_data(lane, most_events) for lane in race.lanes]}
            for race in found
        ],
    }
    text = json.dumps(document, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _lane_data(lane: Lane, most_events: int) -> Json:
    data: Json = {"label": lane.column.label}
    if lane.stream is None:
        return {**data, "reason": lane.reason or "not recorded"}
    events = lane.stream.events[:most_events]
    first_ns = lane.stream.events[0].t_ns
    return {
        **data,
        "request": lane.stream.request_id,
        "median": fmt.milliseconds(tpot_ms(lane.stream)),
        "wait": _ticks((ttft_ms(lane.stream) or 0.0) * 1e6),
        "t": [_ticks(event.t_ns - first_ns) for event in events],
        "n": [event.num_tokens for event in events],
        "text": list(lane.pieces[:most_events]),
        "ids": lane.shows_ids,
        "cut": len(lane.stream.events) - len(events),
    }


def _ticks(nanoseconds: float) -> int:
    return round(nanoseconds * TICKS_PER_MS / 1e6)
