"""The gathered graph is that of programs counted by hand, and the drawn one can be read."""

from __future__ import annotations

import itertools
import json
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.workers import bounded, eventually

from farstep import autograd, rpc
from farstep.autograd import picture
from farstep.autograd.link import link_of
from farstep.autograd.picture import draw, graph
from farstep.autograd.svg import render
from farstep.errors import RpcTimeout, UnknownContext
from farstep.rpc import Agent, RpcOptions
from farstep.rpc.current import current_agent, serving

SVG = "{http://www.w3.org/2000/svg}"
WEIGHTS = [torch.full((4, 4), 0.1 * (k + 1), dtype=torch.float64, requires_grad=True) for k in range(9)]


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    with rpc.local_agents(4) as agents:
        before = serving.set(agents[0])
        yield agents
        serving.reset(before)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(2, 4, dtype=torch.float64, requires_grad=True)


# -- run on workers


def layer(x: torch.Tensor, k: int) -> torch.Tensor:
    return torch.tanh(x @ WEIGHTS[k])


def layer_elsewhere(x: torch.Tensor, k: int, to: str) -> torch.Tensor:
    return rpc.rpc_sync(to, layer, args=(x, k)) + x * 2


def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, x.float()


def plain(x: torch.Tensor) -> int:
    return x.dim()


def graph_from_here(x: torch.Tensor, context_id: int) -> tuple[torch.Tensor, dict[str, Any]]:
    return x * 2, graph(context_id)


# -- the data


def call(to: str, function: Any, *args: Any) -> Any:
    return rpc.rpc_sync(to, function, args=args)


def gathered(context_id: int) -> dict[str, Any]:
    data = bounded_graph(context_id)
    assert json.loads(json.dumps(data)) == data
    return data


def bounded_graph(context_id: int) -> dict[str, Any]:
    agent = serving.get()

    def run() -> dict[str, Any]:
        serving.set(agent)
        return graph(context_id)

    return bounded(run)  # type: ignore[no-any-return]


def by_rank(data: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {worker["rank"]: worker for worker in data["workers"]}


def route(data: dict[str, Any]) -> list[tuple[int, int]]:
    return sorted((edge["from"], edge["to"]) for edge in data["edges"])


def test_one_call(agents: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        call("worker1", layer, x, 1)
        data = gathered(context_id)
    assert data["context"] == context_id
    assert data["opener"] == 0
    assert data["lost"] == []
    mine, peer = data["workers"]
    assert (mine["rank"], mine["name"], peer["rank"], peer["name"]) == (0, "worker0", 1, "worker1")
    (there,), (back,) = mine["sends"], peer["sends"]
    of_tensors = {"tensors": 1, "shapes": [[2, 4]], "dtypes": ["float64"], "bytes": 64}
    assert there == {"id": there["id"], "peer": 1, **of_tensors}
    assert peer["recvs"] == [{"id": there["id"], "peer": 0, **of_tensors}]
    assert back == {"id": back["id"], "peer": 0, **of_tensors}
    assert mine["recvs"] == [{"id": back["id"], "peer": 1, **of_tensors}]
    assert mine["nodes"] == 0  # x itself is sent
    assert mine["segments"] == [{"sends": [there["id"]], "recvs": [], "nodes": 0, "leaves": 1}]
    assert mine["leaves"] == [{"shape": [2, 4], "dtype": "float64", "has_gradient": False, "segment": 0}]
    assert peer["nodes"] == 2  # tanh and the product
    assert peer["segments"] == [{"sends": [back["id"]], "recvs": [there["id"]], "nodes": 2, "leaves": 1}]
    assert [leaf["shape"] for leaf in peer["leaves"]] == [[4, 4]]
    assert data["edges"] == [
        {"id": there["id"], "from": 0, "to": 1, "tensors": 1, "bytes": 64, "received": True},
        {"id": back["id"], "from": 1, "to": 0, "tensors": 1, "bytes": 64, "received": True},
    ]


def test_nested_call(agents: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        call("worker1", layer_elsewhere, x, 2, "worker2")
        data = gathered(context_id)
    assert route(data) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    middle = by_rank(data)[1]
    assert middle["nodes"] == 2  # times two, and the sum
    assert middle["leaves"] == []
    onward, back = (send["id"] for send in middle["sends"])
    came, answer = (recv["id"] for recv in middle["recvs"])
    segments = sorted(middle["segments"], key=lambda s: len(s["sends"]))
    assert segments == [
        {"sends": [back], "recvs": [answer], "nodes": 2, "leaves": 0},
        {"sends": [onward, back], "recvs": [came], "nodes": 0, "leaves": 0},
    ]


def test_call_to_oneself(agents: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        call("worker0", layer, x, 0)
        data = gathered(context_id)
    assert route(data) == [(0, 0), (0, 0)]
    (mine,) = data["workers"]
    assert len(mine["sends"]) == len(mine["recvs"]) == 2
    assert (mine["nodes"], len(mine["leaves"]), len(mine["segments"])) == (2, 2, 2)


def test_fan_out(agents: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        h = x * 1.5
        futures = [rpc.rpc_async(f"worker{k}", layer, args=(h, k)) for k in (1, 2, 3)]
        assert sum(future.wait() for future in futures).requires_grad
        data = gathered(context_id)
    assert route(data) == [(0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (3, 0)]
    mine = by_rank(data)[0]
    (segment,) = mine["segments"]
    assert segment["sends"] == [send["id"] for send in mine["sends"]]
    assert (segment["nodes"], segment["leaves"]) == (1, 1)
    assert all(by_rank(data)[k]["nodes"] == 2 for k in (1, 2, 3))


def test_several_tensors_of_several_types(agents: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        call("worker1", two, x)
        data = gathered(context_id)
    (send,) = by_rank(data)[1]["sends"]
    assert (send["tensors"], send["dtypes"], send["bytes"]) == (2, ["float64", "float32"], 96)
    assert by_rank(data)[0]["recvs"][0]["dtypes"] == ["float64", "float32"]


def test_a_tensor_that_wants_no_gradient_after_all(agents: list[Agent], x: torch.Tensor) -> None:
    with torch.no_grad():
        view = x.view(8)
    with autograd.context() as context_id:
        call("worker1", two, view)
        call("worker1", layer, x, 1)
        data = gathered(context_id)
        check(data)
    assert [send["shapes"] for send in by_rank(data)[0]["sends"]] == [[[8]], [[2, 4]]]


def test_before_and_after_backward(agents: list[Agent], x: torch.Tensor) -> None:
    here, unused = torch.ones(4, dtype=torch.float64, requires_grad=True), WEIGHTS[3]
    with autograd.context() as context_id:
        loss = (call("worker1", layer, x, 1) * here).sum()
        call("worker2", layer, unused, 2)
        before = gathered(context_id)
        autograd.backward(context_id, [loss], timeout=10)
        after = gathered(context_id)
    assert not any(leaf["has_gradient"] for worker in before["workers"] for leaf in worker["leaves"])
    leaves = {
        rank: {tuple(leaf["shape"]): leaf["has_gradient"] for leaf in worker["leaves"]}
        for rank, worker in by_rank(after).items()
    }
    # `here` is above the recvs, where only backward finds it
    assert leaves == {0: {(2, 4): True, (4, 4): False, (4,): True}, 1: {(4, 4): True}, 2: {(4, 4): False}}
    assert [leaf["segment"] for leaf in by_rank(after)[0]["leaves"]] == [0, 1, None]
    for worker in (w for data in (before, after) for w in data["workers"]):
        worker["leaves"] = ()
    assert after == before


def test_a_context_that_went_nowhere(agents: list[Agent]) -> None:
    with autograd.context() as context_id:
        data = gathered(context_id)
    assert [worker["rank"] for worker in data["workers"]] == [0]
    assert data["edges"] == []


def test_calls_without_gradients_leave_a_worker_without_messages(
    agents: list[Agent], x: torch.Tensor
) -> None:
    with autograd.context() as context_id:
        call("worker1", plain, x.detach())
        data = gathered(context_id)
    assert [worker["name"] for worker in data["workers"]] == ["worker0", "worker1"]
    assert data["edges"] == []


def test_it_can_be_gathered_from_any_worker(agents: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        call("worker2", layer, x, 2)
        _, seen = call("worker1", graph_from_here, x, context_id)
    assert [worker["name"] for worker in seen["workers"]] == ["worker0", "worker1", "worker2"]


def test_looking_changes_nothing(agents: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        call("worker1", layer_elsewhere, x, 2, "worker2")
        known = autograd._current_context()._known_worker_ids()
        assert gathered(context_id) == graph(context_id)
        assert autograd._current_context()._known_worker_ids() == known == {1}


def test_unknown_context(agents: list[Agent], tmp_path: Path) -> None:
    with autograd.context() as context_id:
        pass
    for gone in (context_id, 12345):
        with pytest.raises(UnknownContext):
            graph(gone)
        with pytest.raises(UnknownContext):
            draw(gone, tmp_path / "graph.svg")
    assert list(tmp_path.iterdir()) == []


def test_a_lost_worker_is_named_and_what_only_it_knew_is_found(agents: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        call("worker1", layer_elsewhere, x, 2, "worker2")
        whole = gathered(context_id)
        agents[1].close()
        eventually(lambda: not agents[0].is_present(1))
        data = gathered(context_id)
        assert data["lost"] == ["worker1"]
        assert [worker["name"] for worker in data["workers"]] == ["worker0", "worker1", "worker2"]
        assert by_rank(data)[1]["sends"] == by_rank(data)[1]["recvs"] == []
        assert by_rank(data)[2] == by_rank(whole)[2]
        edges = {(edge["from"], edge["to"]): edge for edge in data["edges"]}
        assert edges.keys() == set(route(whole))
        assert [edges[pair]["received"] for pair in ((0, 1), (1, 0), (1, 2), (2, 1))] == [
            False,
            True,
            True,
            False,
        ]
        drawn = check(data)
    assert "lost" in " ".join(text.text or "" for text in drawn.iter(f"{SVG}text"))


def test_a_worker_that_has_no_part_any_more(agents: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        call("worker1", layer, x, 1)
        link_of(agents[1]).release(context_id)
        data = gathered(context_id)
        check(data)
    assert (route(data), data["lost"]) == ([(0, 1), (1, 0)], [])
    assert by_rank(data)[1]["sends"] == by_rank(data)[1]["recvs"] == []


def test_a_worker_that_does_not_answer_is_waited_for_as_long_as_a_call(
    agents: list[Agent], x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, describe = threading.Event(), picture._describe

    def slowly(context: Any) -> dict[str, Any]:
        if current_agent() is agents[1]:
            over.wait(20)
        return describe(context)

    monkeypatch.setattr(picture, "_describe", slowly)
    with autograd.context() as context_id:
        call("worker1", layer, x, 1)
        agents[0].rpc_timeout = 0.2
        with pytest.raises(RpcTimeout):
            bounded_graph(context_id)
        over.set()


def test_workers_that_trust_little(x: torch.Tensor) -> None:
    with rpc.local_agents(2, RpcOptions(trusted=(__name__,))) as agents:
        before = serving.set(agents[0])
        with autograd.context() as context_id:
            call("worker1", layer, x, 1)
            assert route(gathered(context_id)) == [(0, 1), (1, 0)]
        serving.reset(before)


# -- the picture


def check(data: dict[str, Any]) -> ET.Element:
    """Whatever the graph: a lane for each worker, an arrow for each message, and no text on other text, lines or boxes."""
    drawn = ET.fromstring(render(data))
    assert drawn.tag == f"{SVG}svg"
    assert len(marked(drawn, "lane")) == len(data["workers"])
    assert sorted(m.get("data-id") for m in marked(drawn, "message")) == sorted(
        str(edge["id"]) for edge in data["edges"]
    )
    assert len(marked(drawn, "gradient")) == len(data["edges"])
    texts = [(extent(text), text.text) for text in drawn.iter(f"{SVG}text")]
    assert [b for a, b in itertools.combinations(texts, 2) if meet(a[0], b[0])] == []
    width, height = float(drawn.get("width", 0)), float(drawn.get("height", 0))
    assert [t for (x0, y0, x1, y1), t in texts if x0 < 0 or y0 < 0 or x1 > width or y1 > height] == []
    boxes = [rectangle(r) for r in marked(drawn, "part")]
    assert not any(meet(a, b) for a, b in itertools.combinations(boxes, 2))
    outside = [(e, t) for e, t in texts if not any(inside(e, box) for box in boxes)]
    assert [t for e, t in outside if any(meet(e, box) for box in boxes)] == []
    lines = [rectangle(line) for line in drawn.iter(f"{SVG}line") if line.get("class") != "tail"]
    assert [t for e, t in outside if any(meet(e, line) for line in lines)] == []
    return drawn


def marked(drawn: ET.Element, name: str) -> list[ET.Element]:
    return [e for e in drawn.iter() if name in (e.get("class") or "").split()]


Extent = tuple[float, float, float, float]


def extent(text: ET.Element) -> Extent:
    size = float(text.get("font-size", 0))
    width = 0.6 * size * len(text.text or "")
    x, y = float(text.get("x", 0)), float(text.get("y", 0))
    left = {"start": x, "middle": x - width / 2, "end": x - width}[text.get("text-anchor", "start")]
    return left, y - 0.75 * size, left + width, y + 0.2 * size


def rectangle(e: ET.Element) -> Extent:
    if e.tag == f"{SVG}line":
        x1, y1, x2, y2 = (float(e.get(key, 0)) for key in ("x1", "y1", "x2", "y2"))
        return min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)
    x, y, width, height = (float(e.get(key, 0)) for key in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


def meet(a: Extent, b: Extent) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def inside(a: Extent, b: Extent) -> bool:
    return b[0] <= a[0] and b[1] <= a[1] and a[2] <= b[2] and a[3] <= b[3]


@pytest.mark.parametrize("kind", [str, Path])
def test_draw_writes_a_picture(agents: list[Agent], x: torch.Tensor, tmp_path: Path, kind: Any) -> None:
    with autograd.context() as context_id:
        loss = call("worker1", layer, x, 1).sum()
        autograd.backward(context_id, [loss], timeout=10)
        draw(context_id, kind(tmp_path / "graph.svg"))
        drawn = check(graph(context_id))
    written = (tmp_path / "graph.svg").read_text()
    assert str(context_id) in written
    assert len(marked(ET.fromstring(written), "message")) == 2
    assert len(marked(drawn, "all-gradients")) == 2 + 1  # x, the weight, and the legend


@pytest.mark.parametrize("name", ["graph.png", "graph", "graph.svg.txt", "svg"])
def test_draw_writes_svg_only(agents: list[Agent], tmp_path: Path, name: str) -> None:
    with autograd.context() as context_id, pytest.raises(ValueError, match="svg"):
        draw(context_id, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_pictures_of_programs(agents: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        check(graph(context_id))
        h = call("worker1", layer_elsewhere, x, 2, "worker2")
        check(graph(context_id))
        h = call("worker0", layer, h, 0)
        check(graph(context_id))
        h = call("worker3", layer_elsewhere, h, 3, "worker3")  # loops below the last lane
        check(graph(context_id))
        futures = [rpc.rpc_async(f"worker{k}", layer, args=(h * x, k)) for k in (1, 2, 3)]
        h = sum(future.wait() for future in futures)
        check(graph(context_id))
        for hop in range(10):
            h = call(f"worker{hop % 4}", layer, h + x, hop % 4)
        check(graph(context_id))
        autograd.backward(context_id, [h.sum()], timeout=10)
        check(graph(context_id))


def test_arrows_go_from_left_to_right(agents: list[Agent], x: torch.Tensor) -> None:
    with autograd.context() as context_id:
        h = x
        for hop in range(6):
            h = call(f"worker{1 + hop % 3}", layer, h, hop)
        drawn = check(graph(context_id))
    at = {int(m.get("data-id", 0)): float(m.get("data-x", 0)) for m in marked(drawn, "message")}
    mine = [at[id] for id in sorted(at) if id >> 48 == 0]
    replies = sorted(at[id] for id in at if id >> 48)
    assert mine == sorted(mine)
    assert all(there < back for there, back in zip(mine, replies, strict=True))
    assert all(back < there for back, there in zip(replies, mine[1:], strict=False))


def test_names_that_need_care() -> None:
    names = ["a-name_with:signs", "a" * 120]
    with rpc.local_agents(2, names=names) as agents:
        before = serving.set(agents[0])
        x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
        with autograd.context() as context_id:
            call(names[1], layer, x, 1)
            drawn = check(graph(context_id))
        serving.reset(before)
    shown = [text.text for text in drawn.iter(f"{SVG}text")]
    assert names[0] in shown
    assert "a" * 27 + "…" in shown
