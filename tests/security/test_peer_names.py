"""A peer with the secret that speaks in others' names: of their contexts, passes, optimizers, gatherings and losses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.workers import bounded, eventually, speaking_for
from torch import nn, optim

from farstep import autograd, rpc
from farstep.autograd.context import COUNTER_BITS
from farstep.errors import AutogradError, OptimError, RpcError
from farstep.optim import DistributedOptimizer, calls, parameter_rrefs
from farstep.rpc import Agent
from farstep.rpc.departure import Leaving
from farstep.rpc.gather import all_gather
from farstep.rpc.payload import Packed, pack
from farstep.rpc.wire import Kind

from .hostile import ask, heard, is_lost, names, say

PATIENCE_S = 60.0
ANN, BOB, CID, MAL = range(4)
weight = torch.tensor([2.0, 3.0], requires_grad=True)
kept: dict[str, Any] = {}


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    options = rpc.RpcOptions(rpc_timeout=PATIENCE_S)
    with rpc.local_agents(4, options, names=["ann", "bob", "cid", "mal"]) as agents:
        for agent in agents:
            for other in agents:
                agent.call_sync(other.info.name, len, ([],), {}, PATIENCE_S)
        with speaking_for(agents[ANN]):
            yield agents
        kept.clear()


def goes_on(agents: list[Agent]) -> None:
    """The honest ones have one another, and gradients are exact."""
    for agent in agents[:MAL]:
        assert {"ann", "bob", "cid"} <= set(names(agent))
    with autograd.context() as context_id:
        x = ones()
        is_exact(context_id, x, rpc.rpc_sync("bob", through, args=(x, "cid")), power=2)


def ones() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * weight


def through(x: torch.Tensor, *workers: str) -> torch.Tensor:
    x = scaled(x)
    return rpc.rpc_sync(workers[0], through, args=(x, *workers[1:])) if workers else x  # type: ignore[no-any-return]


def is_exact(context_id: int, x: torch.Tensor, y: torch.Tensor, power: int = 1) -> None:
    autograd.backward(context_id, [y.sum()], timeout=PATIENCE_S)
    torch.testing.assert_close(autograd.get_gradients(context_id)[x], weight.detach() ** power)


def contexts(agents: list[Agent]) -> list[int]:
    return [c.id for a in agents if a.has_extension for c in a.extension.contexts()]  # type: ignore[attr-defined]


# -- contexts


def test_a_context_that_has_not_reached_a_worker_cannot_be_named_by_it(agents: list[Agent]) -> None:
    """mal tries the ids that ann may have given so far: it calls bob in each, and then releases it."""
    with autograd.context() as context_id:
        x = ones()
        y = rpc.rpc_sync("bob", scaled, args=(x,))
        for number in range(100):
            guess = (ANN << COUNTER_BITS) + number
            extra = ((), (guess, 0, True))
            ask(agents[MAL], "bob", Kind.CALL, ("builtins", "len"), pack(([],)), extra=extra)
            say(agents[MAL], "bob", Kind.EXTENSION, ("release", guess))
        heard(agents[MAL], "bob")
        is_exact(context_id, x, y)
    eventually(lambda: not contexts(agents), "the release of every context")


def call_in_context(to: str) -> None:
    rpc.rpc_sync(to, scaled, args=(ones(),))


def test_a_caller_releases_only_its_own_part(agents: list[Agent]) -> None:
    """ann has called bob and mal; mal has called bob in ann's context, and wants it released there."""
    with autograd.context() as context_id:
        x = ones()
        y = rpc.rpc_sync("bob", scaled, args=(x,))
        rpc.rpc_sync("mal", call_in_context, args=("bob",))
        for _ in range(3):
            ask(agents[MAL], "bob", Kind.EXTENSION, ("release", context_id))
        is_exact(context_id, x, y)
    assert contexts(agents) == []


def test_a_context_in_a_ring_of_callers_ends(agents: list[Agent]) -> None:
    """cid is called by bob and, further on, by mal, which waits for cid's own word."""
    with autograd.context() as context_id:
        x = ones()
        is_exact(context_id, x, through(x, "bob", "cid", "mal", "cid", "mal"), power=6)
    assert contexts(agents) == []


def test_a_worker_that_is_no_opener_does_not_close_a_context(agents: list[Agent]) -> None:
    with autograd.context() as context_id:
        x = ones()
        y = rpc.rpc_sync("bob", scaled, args=(x,))
        with speaking_for(agents[MAL]):
            module = rpc.RemoteModule("bob", nn.Linear, args=(2, 2))
            optimizer = DistributedOptimizer(optim.SGD, parameter_rrefs(module), lr=0.1)
            [owner] = optimizer._owners.values()
            with pytest.raises(OptimError, match="only the worker that opened"):
                rpc.rpc_sync("bob", calls._step, args=(owner.id, context_id, True, PATIENCE_S, None))
        is_exact(context_id, x, y)
    assert contexts(agents) == []


def post_tensor(agent: Agent, to: str, extra: Any) -> None:
    packed = pack((torch.ones(2, requires_grad=True),))
    agent.peer(to).post(Kind.CALL, 999, (__name__, "scaled"), packed, extra=extra)


def test_tensors_in_anothers_name_take_no_gradient_away(agents: list[Agent]) -> None:
    """mal sends bob a tensor under the number of the one that ann has sent: its gradient would go to mal."""
    with autograd.context() as context_id:
        x = ones()
        y = rpc.rpc_sync("bob", scaled, args=(x,))
        [send] = autograd._retrieve_context(context_id)._send_functions()
        post_tensor(agents[MAL], "bob", ((0,), (context_id, send, True)))
        is_lost(agents[BOB], "mal")
        is_exact(context_id, x, y)
    goes_on(agents)


EXTRAS: dict[str, Any] = {
    "no pair": 5,
    "no context": ((0,), (None, 0, True)),
    "a context of lists": ((0,), ([], 0, True)),
    "a send of text": ((0,), (5, "7", True)),
    "a wish that is none": ((0,), (5, 0, 1)),
    "tensors by name": (("a",), (5, 0, True)),
    "too much": ((0,), (5, 0, True, 1)),
    "a list": [(0,), (5, 0, True)],
}


@pytest.mark.parametrize("name", EXTRAS)
def test_a_context_that_is_none_costs_its_sender(agents: list[Agent], name: str) -> None:
    post_tensor(agents[MAL], "bob", EXTRAS[name])
    is_lost(agents[BOB], "mal")
    goes_on(agents)


# -- passes

reached = threading.Event()
gate = threading.Event()


def wait_at_gate(gradient: torch.Tensor) -> None:
    reached.set()
    assert gate.wait(PATIENCE_S)


def held_up(x: torch.Tensor) -> torch.Tensor:
    x = scaled(x)
    x.register_hook(wait_at_gate)
    return x * 1.0


def pass_head(verb: str, context_id: int, *rest: Any, root: int = ANN, number: int = 1) -> tuple[Any, ...]:
    return (verb, (root, number), context_id, False, False, "smart", number, *rest)


def own(worker: int, number: int) -> int:
    """The number of a send that this worker makes."""
    return (worker << COUNTER_BITS) + number


FORGED = {
    "settle in the root's name": ("settle", ("settle", BOB), None),
    "a wave in the root's name": ("wave", ("wave", BOB), None),
    "a wave in another's name": ("wave", ("mark", CID, 5), [own(BOB, 1)]),
    "a wave of nothing": ("wave", ("mark", MAL, 5), ["all"]),
    "a wave with a deep key": ("wave", ("mark", MAL, ((),)), [own(BOB, 1)]),
    "a wave with a list": ("wave", ["mark", MAL, 5], [own(BOB, 1)]),
    "a report to another": ("report", (MAL, [], [], None, 1), None),
    "a gradient by name": ("grad", [("x", [True])], False, None),
    "a gradient without an end": ("grad", None, False, None),
    "an unknown verb": ("obey",),
    "a verb that is none": ([],),
    "an abort with more": ("abort", 1),
}


@pytest.mark.parametrize("name", FORGED)
def test_orders_in_the_roots_name_cost_their_sender(agents: list[Agent], name: str) -> None:
    """A pass of ann's stands still on bob. mal has a part in the context, and gives bob orders."""
    reached.clear()
    gate.clear()
    with autograd.context() as context_id:
        x = ones()
        rpc.rpc_sync("mal", call_in_context, args=("bob",))
        loss = rpc.rpc_sync("bob", held_up, args=(x,)).sum()
        waiting = autograd.backward_async(context_id, [loss])
        assert reached.wait(PATIENCE_S)
        verb, *rest = FORGED[name]
        say(agents[MAL], "bob", Kind.EXTENSION, pass_head(verb, context_id, *rest))
        is_lost(agents[BOB], "mal")
        gate.set()
        bounded(waiting.wait)
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], weight.detach())
    goes_on(agents)


REPORTS = {
    "in another's name": ((BOB, [own(BOB, 1)], [], False, 99), None),
    "of another's keys": ((MAL, [own(BOB, 1)], [], False, 99), None),
    "of the roots": ((MAL, ["roots"], [], False, 99), None),
    "of another's wave": ((MAL, [("wave", BOB)], [], False, 99), None),
    "passed on in another's name": ((MAL, [], [(("mark", BOB, 3), CID)], False, 99), None),
    "passed on to a stranger": ((MAL, [], [(own(BOB, 1), CID)], False, 99), None),
    "a failure in another's name": ((MAL, [], [], None, 0), ("BackwardError", ("bob", BOB, "x", "y"))),
    "a failure that is none": ((MAL, [], [], None, 0), ("SystemExit", 1)),
    "no report": (None, None),
    "a deep key": ((MAL, [("mark", (((),),), 1)], [], None, 0), None),
}


@pytest.mark.parametrize("name", REPORTS)
def test_reports_in_others_names_cost_their_sender(agents: list[Agent], name: str) -> None:
    reached.clear()
    gate.clear()
    with autograd.context() as context_id:
        x = ones()
        loss = rpc.rpc_sync("bob", held_up, args=(x,)).sum()
        waiting = autograd.backward_async(context_id, [loss])
        assert reached.wait(PATIENCE_S)
        say(agents[MAL], "ann", Kind.EXTENSION, pass_head("report", context_id, *REPORTS[name]))
        is_lost(agents[ANN], "mal")
        assert not waiting.done()
        gate.set()
        bounded(waiting.wait)
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], weight.detach())
    goes_on(agents)


def test_a_report_of_a_pass_that_has_not_reached_a_worker_counts_for_nothing(agents: list[Agent]) -> None:
    """mal guesses the number of ann's pass, but not its context."""
    reached.clear()
    gate.clear()
    with autograd.context() as context_id:
        x = ones()
        loss = rpc.rpc_sync("bob", held_up, args=(x,)).sum()
        waiting = autograd.backward_async(context_id, [loss])
        assert reached.wait(PATIENCE_S)
        failure = ((MAL, [], [], None, 0), ("AutogradError", "stop"))
        say(agents[MAL], "ann", Kind.EXTENSION, pass_head("report", own(ANN, 1), *failure))
        heard(agents[MAL], "ann")
        gate.set()
        bounded(waiting.wait)
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], weight.detach())


def test_a_pass_is_ended_by_its_root_only(agents: list[Agent]) -> None:
    """mal says to bob, in advance, that ann's next passes have failed."""
    with autograd.context() as context_id:
        x = ones()
        y = rpc.rpc_sync("bob", scaled, args=(x,))
        for number in range(5):
            ask(agents[MAL], "bob", Kind.EXTENSION, pass_head("abort", context_id, number=number))
        is_exact(context_id, x, y)


def test_a_wave_for_what_went_elsewhere_is_refused(agents: list[Agent]) -> None:
    with autograd.context() as context_id:
        x = ones()
        y = rpc.rpc_sync("bob", scaled, args=(x,))
        with speaking_for(agents[BOB]):
            [send] = autograd._retrieve_context(context_id)._send_functions()
        head = pass_head("wave", context_id, ("mark", MAL, 5), [send], root=MAL)
        say(agents[MAL], "bob", Kind.EXTENSION, head)
        heard(agents[MAL], "bob")
        is_exact(context_id, x, y)


@pytest.mark.parametrize(
    "head",
    [("release", []), ("release", "1"), ("joined", None), ("joined",), (), None, ("release", -1), ((), 1)],
    ids=repr,
)
def test_nonsense_about_contexts_costs_its_sender(agents: list[Agent], head: Any) -> None:
    goes_on(agents)
    say(agents[MAL], "bob", Kind.EXTENSION, head)
    is_lost(agents[BOB], "mal")
    goes_on(agents)


def lose_in_hook(gradient: torch.Tensor) -> None:
    class Odd(str):
        pass

    raise AutogradError(Odd("a text of a class of its own"))


def with_odd_error(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lose_in_hook)
    return x * 1.0


def unknown_in_hook(gradient: torch.Tensor) -> None:
    autograd.get_gradients(-7)


def with_unknown_context(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(unknown_in_hook)
    return x * 1.0


@pytest.mark.parametrize("function", [with_odd_error, with_unknown_context])
def test_honest_errors_cost_nobody_the_connection(agents: list[Agent], function: Any) -> None:
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("bob", function, args=(ones(),)).sum()
        with pytest.raises(AutogradError):
            autograd.backward(context_id, [loss])
    goes_on(agents)


# -- optimizers


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (calls._step, (0, False, PATIENCE_S, None)),
        (calls._norms, (0, 2.0)),
        (calls._scale, (0, torch.tensor(0.0))),
        (calls._clamp, (0, 0.0)),
        (calls._state, (PATIENCE_S,)),
        (calls._state_rrefs, (PATIENCE_S,)),
        (calls._prepare, ({}, {}, [], PATIENCE_S)),
        (calls._commit, (PATIENCE_S,)),
        (calls._abandon, ()),
        (calls._add_group, ((1, [], [], {}),)),
        (calls._remove_group, (0,)),
    ],
    ids=lambda x: x.__name__ if callable(x) else "",
)
def test_an_optimizer_is_used_only_by_the_worker_that_made_it(
    agents: list[Agent], function: Any, args: tuple[Any, ...]
) -> None:
    """Even by one that has learned its number."""
    module = rpc.RemoteModule("bob", nn.Linear, args=(2, 2))
    optimizer = DistributedOptimizer(optim.Adam, parameter_rrefs(module), lr=0.1)
    [owner] = optimizer._owners.values()
    with speaking_for(agents[MAL]), pytest.raises(OptimError, match="has no part"):
        rpc.rpc_sync("bob", function, args=(owner.id, *args))
    with autograd.context() as context_id:
        autograd.backward(context_id, [module(torch.ones(1, 2)).sum()])
        optimizer.step(context_id)
    assert len(optimizer.state_dict()["state"]) == 2


def test_an_optimizer_on_its_own_worker_is_used_by_it(agents: list[Agent]) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = DistributedOptimizer(optim.SGD, [rpc.RRef(parameter)], lr=1.0)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("bob", scaled, args=(parameter,)).sum()])
        optimizer.step(context_id)
    torch.testing.assert_close(parameter.detach(), torch.ones(2) - weight.detach())


# -- gatherings


def gathered(agents: list[Agent], members: list[str]) -> dict[str, Any]:
    """What the first of them gets; each brings its own name."""
    chosen = [a for a in agents if a.info.name in members]
    results: dict[str, Any] = {}

    def run(agent: Agent) -> None:
        try:
            results[agent.info.name] = all_gather(agent, agent.info.name, members, PATIENCE_S)
        except RpcError as exc:
            results[agent.info.name] = exc

    threads = [threading.Thread(target=run, args=(agent,)) for agent in chosen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    assert all(each == results[members[0]] for each in results.values()), results
    found: dict[str, Any] = results[members[0]]
    return found


def test_a_part_is_brought_in_ones_own_name(agents: list[Agent]) -> None:
    """mal brings bob's part of the next gathering of ann and bob."""
    head = ("user/ann,bob", 0, "bob", ["ann", "bob"], PATIENCE_S)
    say(agents[MAL], "ann", Kind.GATHER, head, pack(("a lie",)), call_id=5)
    is_lost(agents[ANN], "mal")
    assert gathered(agents, ["ann", "bob"]) == {"ann": "ann", "bob": "bob"}
    goes_on(agents)


PARTS = {
    "of a gathering of others": ("user/ann,bob", 0, "mal", ["ann", "bob"], 1.0),
    "under a name of others": ("user/ann,bob", 0, "mal", ["ann", "mal"], 1.0),
    "of all under a name of some": ("user/ann,mal", 0, "mal", None, 1.0),
    "of one that another leads": ("user/bob,mal", 0, "mal", ["bob", "mal"], 1.0),
    "of names without order": ("user/mal,ann", 0, "mal", ["mal", "ann"], 1.0),
    "of names twice": ("user/ann,ann,mal", 0, "mal", ["ann", "ann", "mal"], 1.0),
    "of no names": ("user/", 0, "mal", [], 1.0),
    "of numbers": ("user/ann,mal", 0, "mal", [1, "mal"], 1.0),
    "without a number": ("user/ann,mal", "0", "mal", ["ann", "mal"], 1.0),
    "without a label": (None, 0, "mal", ["ann", "mal"], 1.0),
    "without time": ("user/ann,mal", 0, "mal", ["ann", "mal"], None),
    "with no time at all": ("user/ann,mal", 0, "mal", ["ann", "mal"], float("nan")),
    "with nothing": None,
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_what_does_not_concern_it_costs_its_sender(agents: list[Agent], name: str) -> None:
    say(agents[MAL], "ann", Kind.GATHER, PARTS[name], pack(("a lie",)), call_id=5)
    is_lost(agents[ANN], "mal")
    assert gathered(agents, ["ann", "bob"]) == {"ann": "ann", "bob": "bob"}


def test_gatherings_that_nobody_comes_to_are_bounded(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farstep.rpc.gather.MAX_LED", 64)
    for number in range(500):
        head = ("user/ann,mal", number, "mal", ["ann", "mal"], 1000.0)
        say(agents[MAL], "ann", Kind.GATHER, head, pack(("x",)), call_id=number + 1)
    heard(agents[MAL], "ann")
    led = agents[ANN].links.gatherings._led
    assert gathered(agents, ["ann", "bob", "cid"]) == {"ann": "ann", "bob": "bob", "cid": "cid"}
    assert len(led) <= 65


class Slot:
    """Arrives as the reference in slot 0."""

    def __reduce__(self) -> Any:
        from farstep.rpc.payload import ref_slot

        return ref_slot, (0,)


def keep(value: Any) -> None:
    kept[rpc.get_worker_info().name] = value


def test_a_forged_reference_in_a_part_costs_the_others_nothing(agents: list[Agent]) -> None:
    """ann would send it on to bob, and bob would take ann for the liar."""
    rref = agents[MAL].remote("cid", len, ([],), {}, PATIENCE_S)
    agents[MAL].call_sync("bob", keep, (rref,), {}, PATIENCE_S)
    note = (CID, "cid", rref._id, kept["bob"]._fork, MAL, False)  # a fork that is bob's
    head = ("user/ann,bob,mal", 0, "mal", ["ann", "bob", "mal"], PATIENCE_S)
    packed = Packed(pack((Slot(),)).body, (), [], [])
    with pytest.raises(RpcError, match="'ann' holds no reference"):
        ask(agents[MAL], "ann", Kind.GATHER, head, packed, refs=[note])
    assert gathered(agents, ["ann", "bob", "mal"]) == {"ann": "ann", "bob": "bob", "mal": "mal"}


# -- losses


@pytest.mark.parametrize(
    "head", [None, ("bob", None, "x"), ([], "x", "y"), ("bob", "x"), (("bob",), "x", "y")], ids=repr
)
def test_word_of_a_loss_that_names_nobody_costs_its_sender(agents: list[Agent], head: Any) -> None:
    say(agents[MAL], "ann", Kind.LOST, head)
    is_lost(agents[ANN], "mal")
    goes_on(agents)


def test_word_of_a_loss_is_made_sure_of(agents: list[Agent]) -> None:
    for name in ("ann", "bob", "cid", "eve"):
        peer = agents[ANN].links.find(name)
        incarnation = "" if peer is None else peer.card.incarnation
        for to in ("ann", "bob", "cid"):
            for _ in range(50):
                say(agents[MAL], to, Kind.LOST, (name, incarnation, "a lie"))
    for to in ("ann", "bob", "cid"):
        heard(agents[MAL], to)
    goes_on(agents)


def test_a_failure_that_blames_another_worker_says_who_says_so(agents: list[Agent]) -> None:
    """mal has a part in the pass, and says that bob is lost."""
    with autograd.context() as context_id:
        reached.clear()
        gate.clear()
        loss = rpc.rpc_sync("mal", held_up, args=(ones(),)).sum()
        waiting = autograd.backward_async(context_id, [loss])
        assert reached.wait(PATIENCE_S)
        failure = ((MAL, [], [], None, 0), ("WorkerLost", ("bob", "it is gone")))
        say(agents[MAL], "ann", Kind.EXTENSION, pass_head("report", context_id, *failure))
        with pytest.raises(RuntimeError, match="so says worker 'mal'"):
            bounded(waiting.wait)
        gate.set()
    goes_on(agents)


# -- goodbyes


def test_many_words_of_an_end_take_one_timer() -> None:
    """A peer that says again and again that its process is about to end."""
    with rpc.local_agents(2) as (good, hostile):
        assert hostile.call_sync(good.info.name, len, ((),), {}, PATIENCE_S) == 0
        for _ in range(500):
            say(hostile, good.info.name, Kind.GOODBYE, ("x", int(Leaving.PROCESS_ENDS)))
        assert hostile.call_sync(good.info.name, len, ((),), {}, PATIENCE_S) == 0  # all has been read
        timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
        assert len(timers) == 1
        for timer in timers:
            timer.cancel()
