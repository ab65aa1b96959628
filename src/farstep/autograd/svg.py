"""The picture of a distributed graph, as SVG.

worker0  │ ┌──────┐        ┌╌╌╌╌╌╌╌╌╌╌┐ │    A lane for each worker. A box is a segment: what the same messages depend on. It ends at
         │ │ part │        ╎ not sent ╎ │    the column of the first of them, and begins where the first message arrives that
         │ └────┬─┘        └▲╌╌╌╌╌╌╌╌╌┘ │    it needs. Each message has its column to itself, as far as it reaches, so nothing
worker1  │     ┌▼───────────┴─┐         │    but boxes, which hide it, is ever in its way; its label is beside it, next to
         │     └──────────────┘         │    the sender's lane, where there is never anything else.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

from farstep.autograd.svg_layout import (
    APART,
    BACK,
    FONT,
    FORWARD,
    GAP,
    GREEN,
    INK,
    LANE,
    LARGE,
    LOST,
    MARGIN,
    MARK,
    NORMAL,
    PAD,
    PART,
    QUIET,
    RED,
    ROW,
    SMALL,
    Data,
    Lane,
    Layout,
    Message,
    Part,
    count,
    size,
    width_of,
)

__all__ = ["render"]


def render(data: Data) -> str:
    """The SVG of what `graph` has gathered."""
    layout = Layout(data)
    title, about = _title(data)
    width = max(layout.lane_right, MARGIN + width_of(title, LARGE), MARGIN + width_of(about, NORMAL))
    body, dots = ET.Element("g"), ET.Element("g")
    for lane in layout.lanes.values():
        _draw_lane(body, lane, layout)
    for message in layout.messages:
        _draw_message(body, message, layout, dots)
    for lane in layout.lanes.values():
        for part in lane.parts:
            _draw_part(body, part)
    body.append(dots)
    kinds = {kind for element in body.iter() for kind in element.get("class", "").split()}
    legend, bottom = _legend(width + MARGIN, layout.bottom + 12, kinds)
    size = {"width": f"{width + MARGIN:g}", "height": f"{bottom + 10:g}"}
    root = ET.Element("svg", size, xmlns="http://www.w3.org/2000/svg")
    root.set("viewBox", f"0 0 {size['width']} {size['height']}")
    root.set("font-family", FONT)
    _add(root, "title").text = title
    _add(root, "rect", **size, fill="#ffffff")
    _text(root, MARGIN, 36, title, LARGE, INK, weight=600)
    _text(root, MARGIN, 58, about, NORMAL, QUIET)
    root.extend((body, legend))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def _title(data: Data) -> tuple[str, str]:
    workers, edges = data["workers"], data["edges"]
    leaves = [leaf["has_gradient"] for worker in workers for leaf in worker["leaves"]]
    about = [
        count(len(workers), "worker"),
        f"{count(len(edges), 'message')} with {size(sum(edge['bytes'] for edge in edges))}",
        count(sum(worker["nodes"] for worker in workers), "node") + " behind them",
        f"{sum(leaves)} of {count(len(leaves), 'leaf')} with a gradient",
    ]
    return f"Autograd context {data['context']}", " · ".join(about)


def _add(parent: ET.Element, tag: str, **attributes: Any) -> ET.Element:
    """`class_` is class, and `_` stands for `-`."""
    named = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
    return ET.SubElement(
        parent, tag, {k: f"{v:g}" if isinstance(v, float) else str(v) for k, v in named.items()}
    )


def _text(
    parent: ET.Element, x: float, y: float, text: str, size: int, color: str, weight: int = 400
) -> None:
    _add(parent, "text", x=x, y=y, font_size=size, fill=color, font_weight=weight).text = text


def _draw_lane(root: ET.Element, lane: Lane, layout: Layout) -> None:
    group = _add(root, "g", class_="lane")
    _add(
        group,
        "rect",
        x=layout.lane_left,
        y=lane.top,
        width=layout.lane_right - layout.lane_left,
        height=lane.bottom - lane.top,
        rx=8,
        fill=LOST if lane.is_lost else LANE,
    )
    middle = (lane.top + lane.bottom) / 2
    _text(group, MARGIN, middle - 3, lane.name, NORMAL, INK, weight=600)
    _text(group, MARGIN, middle + 13, lane.note, SMALL, RED if lane.is_lost else QUIET)


def _draw_part(root: ET.Element, part: Part) -> None:
    group = _add(root, "g")
    middle = part.top + ROW / 2
    if part.reach > part.right:
        ends = {"x1": part.right, "y1": middle, "x2": part.reach - PAD + APART, "y2": middle}
        _add(group, "line", class_="tail", **ends, stroke=PART, stroke_width=1.5)
    _box(group, part.left, part.top, part.right - part.left, ROW, is_sent=bool(part.sends))
    y = middle + 4 - 7 * (len(part.lines) - 1)
    for number, line in enumerate(part.lines):
        is_about_leaves = bool(part.leaves) and number == len(part.lines) - 1
        mark = MARK if is_about_leaves else 0
        left = (part.left + part.right - 0.9 * width_of(line, SMALL) - mark) / 2
        if is_about_leaves:
            _draw_leaf(group, left + 4, y - 4, part.leaves_with_gradient, part.leaves)
        _text(group, left + mark, y, line, SMALL, INK if part.sends or part.leaves else QUIET)
        y += 14


def _box(parent: ET.Element, x: float, y: float, width: float, height: float, *, is_sent: bool) -> None:
    size = {"x": x, "y": y, "width": width, "height": height, "rx": 5}
    box = _add(parent, "rect", class_="part", **size, fill="#ffffff", stroke=PART, stroke_width=1.2)
    if not is_sent:
        box.set("class", "part rest")
        box.set("stroke-dasharray", "4 3")


def _draw_leaf(parent: ET.Element, x: float, y: float, with_gradient: int, count: int) -> None:
    """A ring; full when all leaves have a gradient, half full when some have."""
    which = "all" if with_gradient == count else "some" if with_gradient else "no"
    color = GREEN if with_gradient else QUIET
    fill = GREEN if which == "all" else "#ffffff"
    _add(parent, "circle", class_=f"{which}-gradients", cx=x, cy=y, r=4, fill=fill, stroke=color)
    if which == "some":
        _add(parent, "path", d=f"M{x:g} {y - 4:g}A4 4 0 0 0 {x:g} {y + 4:g}Z", fill=GREEN)


def _draw_message(root: ET.Element, message: Message, layout: Layout, dots: ET.Element) -> None:
    """From the box that is farthest from the receiver. It passes behind other boxes, and a dot marks those it takes along."""
    sender, receiver = layout.lanes[message.sender], layout.lanes[message.receiver]
    to_itself = sender is receiver
    down = to_itself or receiver.top > sender.top
    x, x_end = layout.x(message.start), layout.x(message.end)
    edge = sender.bottom if down else sender.top
    sources = [part for part in sender.parts if message.id in part.sends]
    leaves = [_edge_of(part, x, down) for part in sources]
    start = (min if down else max)(leaves, default=edge)
    for part, y in zip(sources, leaves, strict=True):
        if len(sources) > 1 or x > part.right:
            _dot(dots, x - APART, y)
    arrives = [_edge_of(p, x_end, to_itself or not down) for p in receiver.parts if message.id in p.recvs]
    end = arrives[0] if arrives else receiver.bottom if to_itself or not down else receiver.top
    group = _add(root, "g", class_="message", data_id=message.id, data_x=x)
    _add(group, "title").text = message.hint
    forward, back = [(x - APART, start), (x_end - APART, end)], [(x + APART, end), (x + APART, start)]
    if to_itself:
        forward = _around(x - APART, start, x_end + APART, end, edge + 45)
        back = _around(x_end - APART, end, x + APART, start, edge + 45 - 2 * APART)
    _arrow(_add(group, "g", class_="gradient"), back, BACK, dashes="4 3")
    _arrow(group, forward, FORWARD)
    if not arrives:
        inside = end - 4 if to_itself or not down else end + 4
        _open_end(group, forward[-1][0], inside)
    y = edge + 16 if to_itself else edge + 21 if down else edge - GAP + 21
    _text(group, x + APART + 7, y, message.label[0], SMALL, INK)
    _text(group, x + APART + 7, y + 13, message.label[1], SMALL, QUIET)


def _dot(parent: ET.Element, x: float, y: float) -> None:
    _add(parent, "circle", cx=x, cy=y, r=3, fill=FORWARD)


def _open_end(parent: ET.Element, x: float, y: float) -> None:
    _add(parent, "circle", class_="open", cx=x, cy=y, r=4, fill="#ffffff", stroke=RED, stroke_width=1.5)


def _edge_of(part: Part, x: float, down: bool) -> float:
    """Where an arrow at x meets a box, or the line behind it."""
    if x > part.right:
        return part.top + ROW / 2
    return part.top + ROW if down else part.top


def _around(x0: float, y0: float, x1: float, y1: float, turn: float) -> list[tuple[float, float]]:
    return [(x0, y0), (x0, turn), (x1, turn), (x1, y1)]


def _arrow(parent: ET.Element, points: list[tuple[float, float]], color: str, dashes: str = "none") -> None:
    """Straight pieces, and a head that points up, down or right."""
    (x0, y0), (x, y) = points[-2:]
    style = {"stroke": color, "stroke_width": 1.6, "stroke_dasharray": dashes}
    if x0 == x:
        back = 7 if y > y0 else -7
        head, neck = f"{x - 3.5:g},{y - back:g} {x + 3.5:g},{y - back:g}", (x, y - back)
    else:
        head, neck = f"{x - 7:g},{y - 3.5:g} {x - 7:g},{y + 3.5:g}", (x - 7, y)
    for (xa, ya), (xb, yb) in zip(points, [*points[1:-1], neck], strict=False):
        _add(parent, "line", x1=xa, y1=ya, x2=xb, y2=yb, **style)
    _add(parent, "polygon", points=f"{head} {x:g},{y:g}", fill=color)


# -- the legend

LEGEND = {
    "part": "local part: what the same messages depend on",
    "tail": "sent again later",
    "rest": "not sent on: leads to the roots, or is unused",
    "message": "message with tensors",
    "gradient": "way of its gradients",
    "all-gradients": "leaves, all with a gradient",
    "some-gradients": "some with a gradient",
    "no-gradients": "none with a gradient",
    "open": "its arrival is not known",
}


def _legend(width: float, top: float, kinds: set[str]) -> tuple[ET.Element, float]:
    """Below the lanes, in as many lines as it takes: what there is in the picture. Returns where it ends, too."""
    group = ET.Element("g")
    x, y = float(MARGIN), top
    for kind, text in LEGEND.items():
        if kind not in kinds:
            continue
        needed = 32 + width_of(text, SMALL)
        if x + needed > width - MARGIN and x > MARGIN:
            x, y = float(MARGIN), y + 22
        _sample(group, kind, x, y - 4)
        _text(group, x + 32, y, text, SMALL, QUIET)
        x += needed + 12
    return group, y + 8


def _sample(group: ET.Element, kind: str, x: float, y: float) -> None:
    sample = _add(group, "g")
    if kind in ("part", "rest"):
        _box(sample, x, y - 6, 24, 13, is_sent=kind == "part")
    elif kind == "message":
        _arrow(sample, [(x, y), (x + 24, y)], FORWARD)
    elif kind == "gradient":
        _arrow(sample, [(x, y), (x + 24, y)], BACK, dashes="4 3")
    elif kind == "tail":
        _add(sample, "line", class_="tail", x1=x, y1=y, x2=x + 18, y2=y, stroke=PART, stroke_width=1.5)
        _dot(sample, x + 20, y)
    elif kind == "open":
        _open_end(sample, x + 16, y)
    else:
        _draw_leaf(sample, x + 16, y, {"all-gradients": 2, "some-gradients": 1, "no-gradients": 0}[kind], 2)
