"""Where everything is in the picture of a distributed graph: lanes, boxes, columns.

A box is a segment: what the same messages depend on. Each message has its column to itself, as far as it reaches, in an order in which
the messages may have been sent.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "APART",
    "BACK",
    "FONT",
    "FORWARD",
    "GAP",
    "GREEN",
    "INK",
    "LANE",
    "LARGE",
    "LOST",
    "MARGIN",
    "MARK",
    "NORMAL",
    "PAD",
    "PART",
    "QUIET",
    "RED",
    "ROW",
    "SMALL",
    "Data",
    "Lane",
    "Layout",
    "Message",
    "Part",
    "count",
    "size",
    "width_of",
]

Data = dict[str, Any]

FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
SMALL, NORMAL, LARGE = 11, 13, 17
CHARACTER = 0.62
"""The width of a character, in font sizes: as wide as those of the widest of these fonts are on average."""
LONGEST_NAME = 28
NARROWEST = 720.0
MARGIN = 24
MARK = 12
"""A leaf's ring, and the space after it."""
TOP = 84
ROW, ROW_GAP, LANE_PAD = 38, 8, 10
GAP = 50
"""Between lanes: two lines of a label, and some air."""
PAD = 12
"""How far a box reaches past the arrows at its ends."""
APART = 4.0
"""The two arrows of a message, from the middle of its column."""

INK, QUIET, LANE, LOST = "#1c2733", "#66727f", "#f1f4f8", "#fbeaea"
FORWARD, BACK, PART, GREEN, RED = "#2f5d9b", "#e9a13b", "#8aa0ba", "#2c9c5a", "#b3372f"


def width_of(text: str, size: int) -> float:
    """More than it takes, in any of these fonts."""
    return len(text) * size * CHARACTER


@dataclass
class Message:
    id: int
    sender: int
    receiver: int
    label: tuple[str, str]
    hint: str
    start: int = 0
    """The column where it leaves; it arrives there too, but one later if it goes to the sender itself."""

    @property
    def end(self) -> int:
        return self.start + (self.sender == self.receiver)


@dataclass
class Part:
    """A box: a segment, or what arrives and is not sent on."""

    sends: list[int]
    recvs: list[int]
    nodes: int
    leaves: int
    leaves_with_gradient: int
    left: float = 0
    right: float = 0
    reach: float = 0
    """How far to the right it is used, by its last send: a line goes on behind the box."""
    top: float = 0

    @property
    def lines(self) -> list[str]:
        lines = [count(self.nodes, "node")] if self.nodes else []
        if self.leaves:
            some = 0 < self.leaves_with_gradient < self.leaves
            lines.append((f"{self.leaves_with_gradient}/" if some else "") + count(self.leaves, "leaf"))
        return lines or (["sent on"] if self.sends else ["not", "sent on"])

    @property
    def width(self) -> float:
        marks = MARK if self.leaves else 0
        return max(width_of(line, SMALL) for line in self.lines) + marks + 8


@dataclass
class Lane:
    rank: int
    name: str
    note: str
    is_lost: bool
    parts: list[Part] = field(default_factory=list)
    top: float = 0
    bottom: float = 0


class Layout:
    """Columns for the messages, rows for the boxes, and from these all places."""

    def __init__(self, data: Data) -> None:
        self.messages = _in_columns(data)
        by_id = {message.id: message for message in self.messages}
        self.lanes = {worker["rank"]: _lane(worker, data) for worker in data["workers"]}
        names = [width_of(lane.name, NORMAL) for lane in self.lanes.values()]
        notes = [width_of(lane.note, SMALL) for lane in self.lanes.values()]
        labels = [width_of(line, SMALL) for message in self.messages for line in message.label]
        widths = [part.width for lane in self.lanes.values() for part in lane.parts]
        self.pitch = max([64.0, *(w + 18 for w in labels), *(w + 8 for w in widths)])
        self.lane_left = MARGIN + max(names + notes) + 16
        self.first = self.lane_left + self.pitch
        columns = max((message.end for message in self.messages), default=-1) + 1
        self.lane_right = max(self.first + columns * self.pitch, NARROWEST)
        top = float(TOP)
        for lane in self.lanes.values():
            lane.top = top
            rows = self._place(lane, by_id)
            lane.bottom = top + 2 * LANE_PAD + rows * ROW + (rows - 1) * ROW_GAP
            top = lane.bottom + GAP
        self.bottom = top

    def x(self, column: int) -> float:
        return self.first + column * self.pitch

    def _place(self, lane: Lane, by_id: dict[int, Message]) -> int:
        """Give each box its columns, then the first row that is free there. Returns how many rows there are."""
        for part in lane.parts:
            starts = [self.x(by_id[id].end) for id in part.recvs]
            ends = [self.x(by_id[id].start) for id in part.sends]
            if ends:
                part.right, part.reach = min(ends) + PAD, max(ends) + PAD
                part.left = min([part.right - self.pitch + 8, *(x - PAD for x in starts)])
            else:
                part.left = min(starts, default=self.lane_right - self.pitch) - PAD
                part.right = part.reach = max([part.left + self.pitch - 8, *(x + PAD for x in starts)])
        rows: list[float] = []
        for part in sorted(lane.parts, key=lambda part: (part.left, -part.reach)):
            row = next((i for i, end in enumerate(rows) if end < part.left), len(rows))
            rows[row : row + 1] = [max(part.reach, part.right)]
            part.top = lane.top + LANE_PAD + row * (ROW + ROW_GAP)
        return max(len(rows), 1)


def _lane(worker: Data, data: Data) -> Lane:
    name = "".join(c if c.isprintable() else "?" for c in worker["name"])
    if len(name) > LONGEST_NAME:
        name = name[: LONGEST_NAME - 1] + "…"
    is_lost = worker["name"] in data["lost"]
    note = f"rank {worker['rank']}" + (", opener" if worker["rank"] == data["opener"] else "")
    parts = [
        Part(s["sends"], s["recvs"], s["nodes"], s["leaves"], _leaves_with_gradient(worker, number))
        for number, s in enumerate(worker["segments"])
    ]
    sent_on = {id for part in parts for id in part.recvs}
    rest = [recv["id"] for recv in worker["recvs"] if recv["id"] not in sent_on]
    more = _leaves_with_gradient(worker, None)
    if rest or more:
        parts.append(Part([], rest, 0, more, more))
    return Lane(worker["rank"], name, "lost" if is_lost else note, is_lost, parts)


def _leaves_with_gradient(worker: Data, segment: int | None) -> int:
    return sum(leaf["segment"] == segment and leaf["has_gradient"] for leaf in worker["leaves"])


def _in_columns(data: Data) -> list[Message]:
    """The messages in an order in which they may have been sent, each with its column.

    On each worker, sends follow one another and so do recvs, and a send comes after the recvs it depends on. What depends on fewer
    messages comes first. Messages share a column when they have no lane in common.
    """
    lanes = {worker["rank"]: lane for lane, worker in enumerate(data["workers"])}
    shown = _hints(data)
    messages = {
        edge["id"]: Message(
            edge["id"],
            edge["from"],
            edge["to"],
            (size(edge["bytes"]), count(edge["tensors"], "tensor")),
            shown.get(edge["id"], ""),
        )
        for edge in data["edges"]
    }
    before: dict[int, set[int]] = {id: set() for id in messages}
    needs: dict[int, set[int]] = {id: set() for id in messages}
    for worker in data["workers"]:
        for list_of in (worker["sends"], worker["recvs"]):
            for one, other in itertools.pairwise(list_of):
                before[other["id"]].add(one["id"])
        for segment in worker["segments"]:
            for send in segment["sends"]:
                needs[send].update(segment["recvs"])
    taken: list[set[int]] = []
    order = []
    for id in _ordered(before, needs):
        message = messages[id]
        one, other = sorted((lanes[message.sender], lanes[message.receiver]))
        span = set(range(one, other + 1))
        message.start = max((messages[i].end + 1 for i in before[id] | needs[id]), default=0)
        taken += [set() for _ in range(message.end + 1 - len(taken))]
        while span & taken[message.start] or span & taken[message.end]:
            message.start += 1
            taken += [set() for _ in range(message.end + 1 - len(taken))]
        taken[message.start] |= span
        taken[message.end] |= span
        order.append(message)
    return order


def _ordered(before: dict[int, set[int]], needs: dict[int, set[int]]) -> Iterator[int]:
    left = {id: before[id] | needs[id] for id in before}
    after: dict[int, list[int]] = {id: [] for id in before}
    for id, others in left.items():
        for other in others:
            after[other].append(id)
    depth = dict.fromkeys(before, 0)
    ready = [(0, id) for id in before if not left[id]]
    heapq.heapify(ready)
    waiting = set(before)
    while waiting:
        if not ready:
            ready.append(
                (0, min(waiting))
            )  # a circle: no forward pass makes one, but a picture is not the place to fail
        _, id = heapq.heappop(ready)
        if id not in waiting:
            continue
        waiting.remove(id)
        yield id
        for other in after[id]:
            if id in needs[other]:
                depth[other] = max(depth[other], depth[id] + 1)
            left[other].discard(id)
            if not left[other]:
                heapq.heappush(ready, (depth[other], other))


def _hints(data: Data) -> dict[int, str]:
    """What a browser shows for a message under the mouse."""
    shown = {}
    for worker in data["workers"]:
        for message in (*worker["recvs"], *worker["sends"]):
            tensors = zip(message["dtypes"], message["shapes"], strict=True)
            lines = [f"{dtype or '?'} {shape if shape is not None else '?'}" for dtype, shape in tensors]
            shown[message["id"]] = "\n".join([f"message {message['id']}", *lines])
    return shown


def count(number: int, noun: str) -> str:
    plural = "leaves" if noun == "leaf" else noun + "s"
    return f"{number} {noun if number == 1 else plural}"


def size(number: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            break
        number /= 1000
    return f"{number:.3g} {unit}" if number < 1000 else f"{number:.0f} {unit}"
