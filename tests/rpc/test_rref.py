"""The owner forgets a value exactly when its last user is gone, however references travel and whoever dies."""

from __future__ import annotations

import gc
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from support.workers import Group, bounded, eventually

from farstep import rpc
from farstep.errors import RpcTimeout, RRefError
from farstep.rpc import Agent, RRef
from farstep.rpc.wire import Kind

TIMEOUT_S = 20.0


class Thing:
    """A value whose life can be watched from outside: all agents are in this process."""

    alive: ClassVar[weakref.WeakSet[Thing]] = weakref.WeakSet()

    def __init__(self, number: int = 0) -> None:
        self.number = number
        Thing.alive.add(self)

    def add(self, x: int) -> int:
        return self.number + x

    def another(self, number: int) -> Thing:
        return Thing(number)

    def fail(self) -> None:
        raise KeyError("from the value")

    def __reduce__(self) -> Any:
        return dict, ({"number": self.number},)  # a copy is not a Thing


def make_thing(number: int = 0) -> Thing:
    return Thing(number)


def things() -> int:
    gc.collect()
    return len(Thing.alive)


def gone(count: int = 0) -> None:
    eventually(lambda: things() == count, f"the owner keeping {count} values")


@pytest.fixture
def agents(caplog: pytest.LogCaptureFixture) -> Iterator[list[Agent]]:
    caplog.set_level("CRITICAL", "farstep.rpc")  # a captured record holds the exception, and that its frames
    Thing.alive.clear()
    with rpc.local_agents(4, names=["ann", "bob", "cid", "dan"]) as agents:
        yield agents
        kept.clear()


def remote(agent: Agent, to: str, function: Any = make_thing, *args: Any) -> RRef[Any]:
    return agent.remote(to, function, args, {}, TIMEOUT_S)


def call(agent: Agent, to: str, function: Any, *args: Any) -> Any:
    return agent.call_sync(to, function, args, {}, TIMEOUT_S)


# -- what workers do with a reference they get

kept: dict[str, list[Any]] = {}


def keep(rref: Any) -> None:
    kept.setdefault(rpc.get_worker_info().name, []).append(rref)


def drop_all() -> None:
    kept.pop(rpc.get_worker_info().name, None)


def look(rref: RRef[Any]) -> int:
    return int(rref.to_here()["number"]) if not rref.is_owner() else rref.local_value().number  # type: ignore[no-any-return]


def send_on(rref: RRef[Any], to: str, function: Any) -> Any:
    """Send the reference to a third worker and drop this worker's own at once."""
    future = rpc.rpc_async(to, function, args=(rref,))
    del rref
    return future.wait()


def send_along(rref: RRef[Any], route: list[str]) -> None:
    if route:
        rpc.rpc_sync(route[0], send_along, args=(rref, route[1:]))
    else:
        keep(rref)


def give_back(rref: RRef[Any]) -> RRef[Any]:
    return rref


def give_kept() -> Any:
    return kept[rpc.get_worker_info().name][0]


def make_rref(number: int) -> RRef[Thing]:
    return RRef(Thing(number))


def make_remote(to: str, number: int) -> RRef[Thing]:
    return rpc.remote(to, make_thing, args=(number,))


def all_forgotten(agents: list[Agent]) -> None:
    gone()
    for agent in agents:
        eventually(
            lambda agent=agent: not any(agent.rrefs.counts().values()),
            f"{agent.info.name} having no reference left",
        )


# -- who holds it


def test_the_value_lives_as_long_as_its_user(agents: list[Agent]) -> None:
    rref = remote(agents[0], "bob", make_thing, 7)
    assert rref.to_here() == {"number": 7}
    assert things() == 1
    assert (rref.owner_name(), rref.is_owner()) == ("bob", False)
    assert rref.owner() == agents[1].info
    for _ in range(3):
        rref.to_here()
    assert things() == 1
    del rref
    all_forgotten(agents)


def test_the_value_is_forgotten_also_when_the_user_never_looked(agents: list[Agent]) -> None:
    remote(agents[0], "bob")
    all_forgotten(agents)


def test_a_reference_to_oneself(agents: list[Agent]) -> None:
    rref = remote(agents[0], "ann", make_thing, 3)
    assert rref.is_owner()
    assert rref.to_here().number == 3
    assert rref.to_here() is rref.local_value()
    assert call(agents[0], "ann", look, rref) == 3
    del rref
    all_forgotten(agents)


def test_the_owner_made_it_and_shares_it(agents: list[Agent]) -> None:
    rref = call(agents[0], "bob", make_rref, 4)
    assert rref.owner_name() == "bob"
    assert rref.to_here() == {"number": 4}
    call(agents[0], "cid", keep, rref)
    del rref
    assert call(agents[3], "cid", len, []) == 0
    assert things() == 1
    call(agents[0], "cid", drop_all)
    all_forgotten(agents)


def test_a_chain_of_users(agents: list[Agent]) -> None:
    """ann -> bob -> cid -> dan, the value on ann, bob or made elsewhere; only the last one keeps it."""
    for owner in ("ann", "bob", "dan"):
        rref = remote(agents[0], owner, make_thing, 1)
        call(agents[0], "bob", send_along, rref, ["cid", "dan", "cid"])
        del rref
        assert things() == 1
        assert call(agents[0], "cid", look_at_kept) == 1
        assert things() == 1
        call(agents[0], "cid", drop_all)
        all_forgotten(agents)


def look_at_kept() -> int:
    return look(kept[rpc.get_worker_info().name][0])


@pytest.mark.parametrize("owner", ["ann", "bob", "cid", "dan"])
@pytest.mark.parametrize("function", [look, keep], ids=["look", "keep"])
def test_a_user_sends_it_to_a_third_and_drops_its_own_at_once(
    agents: list[Agent], owner: str, function: Any
) -> None:
    for i in range(30):
        rref = remote(agents[0], owner, make_thing, i)
        future = agents[0].call_async("bob", send_on, (rref, "cid", function), {}, TIMEOUT_S)
        del rref
        assert bounded(future.wait) in (None, i)
        del future
    if function is keep:
        assert things() == 30
        assert [call(agents[0], "cid", look_at_kept) for _ in range(2)] == [0, 0]
        call(agents[0], "cid", drop_all)
    all_forgotten(agents)


def test_back_to_the_owner(agents: list[Agent]) -> None:
    rref = remote(agents[0], "bob", make_thing, 5)
    assert call(agents[0], "bob", look, rref) == 5
    call(agents[0], "bob", keep, rref)
    del rref
    assert things() == 1  # the owner's own code holds it now
    assert call(agents[0], "bob", look_at_kept) == 5
    again = call(agents[2], "bob", give_kept)
    call(agents[0], "bob", drop_all)
    assert again.to_here() == {"number": 5}
    del again
    all_forgotten(agents)


def test_in_results(agents: list[Agent]) -> None:
    rref = remote(agents[0], "bob", make_thing, 6)
    back = call(agents[0], "cid", give_back, rref)
    del rref
    assert back.to_here() == {"number": 6}
    assert things() == 1
    mine = call(agents[0], "cid", make_remote, "dan", 8)
    assert mine.to_here() == {"number": 8}
    home = call(agents[0], "cid", make_remote, "ann", 9)
    assert home.is_owner()
    assert home.local_value().number == 9
    assert things() == 3
    del back, mine, home
    all_forgotten(agents)


def test_references_that_come_in_results_are_confirmed(agents: list[Agent]) -> None:
    rref = call(agents[0], "cid", make_remote, "dan", 8)
    eventually(rref.confirmed_by_owner, "the owner's confirmation")
    assert agents[0].rrefs.counts()["num_pending_users"] == 0


def test_several_in_one_message(agents: list[Agent]) -> None:
    rrefs = [remote(agents[0], agents[i % 4].info.name, make_thing, i) for i in range(12)]
    got = call(agents[0], "cid", give_back, {"deep": rrefs, "again": rrefs[0]})
    del rrefs
    assert sorted(
        r.local_value().number if r.is_owner() else r.to_here()["number"] for r in got["deep"]
    ) == list(range(12))
    del got
    all_forgotten(agents)


def test_a_reference_inside_a_reference(agents: list[Agent]) -> None:
    outer = remote(agents[0], "bob", make_remote, "cid", 2)
    inner = outer.to_here()
    assert inner.to_here() == {"number": 2}
    del outer
    assert inner.to_here() == {"number": 2}
    del inner
    all_forgotten(agents)


def test_late_answers_and_timeouts_leave_no_reference_behind(agents: list[Agent]) -> None:
    rref = remote(agents[0], "bob", make_thing, 1)
    with pytest.raises(RpcTimeout):
        agents[0].call_sync("cid", hold_on, (rref,), {}, 0.05)
    holding.set()
    del rref
    all_forgotten(agents)


holding = threading.Event()


def hold_on(rref: Any) -> Any:
    holding.wait(TIMEOUT_S)
    return rref


@pytest.mark.parametrize(
    "order",
    [
        o
        for o in itertools.permutations(["add", "confirm", "delete"])
        if o.index("confirm") < o.index("delete")
    ],
    ids=" ".join,
)
def test_words_about_a_fork_may_overtake_one_another(agents: list[Agent], order: tuple[str, ...]) -> None:
    """ann sends bob's reference to cid. What ann and cid tell bob takes two connections, so it comes in any order in
    which cid's own words are (confirm before delete)."""
    ann, bob, cid, _ = agents
    rref = remote(ann, "bob", make_thing, 1)
    rref.to_here()
    fork = (ann.info.id, 10_000)
    answered = threading.Event()
    for word in order:
        teller = ann if word == "add" else cid
        items = {
            "add": (rref._id, fork, cid.info.id),
            "confirm": (rref._id, fork, ann.info.id),
            "delete": (rref._id, fork),
        }
        before = bob.tally.received
        if word == "confirm":
            teller.request(teller.peer("bob"), Kind.RREF, (word, [items[word]]), lambda *_: answered.set())
        else:
            teller.peer("bob").post(Kind.RREF, 0, (word, [items[word]]))
        call(teller, "bob", len, [])  # on the same connection: what was sent before has been heard
        assert bob.tally.received > before
    assert answered.wait(TIMEOUT_S)
    assert things() == 1
    del rref
    all_forgotten(agents)
    assert not len(bob.rrefs._early)


@pytest.mark.slow
def test_a_thousand_references(agents: list[Agent]) -> None:
    rrefs = [remote(agents[0], agents[1 + i % 3].info.name, make_thing, i) for i in range(1000)]
    assert [r.to_here()["number"] for r in rrefs] == list(range(1000))
    for rref in rrefs[::2]:
        call(agents[0], "cid", keep, rref)
    assert things() == 1000
    del rrefs, rref
    gone(500)
    call(agents[0], "cid", drop_all)
    all_forgotten(agents)


def test_many_threads_share_and_drop(agents: list[Agent]) -> None:
    errors: list[BaseException] = []

    def work(agent: Agent) -> None:
        try:
            for i in range(25):
                rref = remote(agent, "bob", make_thing, i)
                assert call(agent, "cid", send_on, rref, "dan", look) == i
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=work, args=(agents[n % 4],)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert errors == []
    all_forgotten(agents)


# -- using it


def test_calls_on_the_value(agents: list[Agent]) -> None:
    rref = remote(agents[0], "bob", make_thing, 10)
    assert rref.rpc_sync().add(5) == 15
    assert bounded(rref.rpc_async().add(6).wait) == 16
    other = rref.remote().another(20)
    assert other.to_here() == {"number": 20}
    assert other.owner_name() == "bob"
    with pytest.raises(KeyError, match="from the value"):
        rref.rpc_sync().fail()
    with pytest.raises(AttributeError):
        rref.rpc_sync().no_such_method()
    del other, rref
    all_forgotten(agents)


def test_the_value_is_only_local_on_its_owner(agents: list[Agent]) -> None:
    rref = remote(agents[0], "bob")
    with pytest.raises(RRefError, match=r"to_here\(\)"):
        rref.local_value()


def fail_to_make() -> None:
    raise KeyError("not made")


def test_a_value_that_could_not_be_made(agents: list[Agent]) -> None:
    rref = remote(agents[0], "bob", fail_to_make)
    for _ in range(2):
        with pytest.raises(KeyError, match="not made"):
            rref.to_here()
    with pytest.raises(KeyError, match="not made"):
        bounded(rref.get_future().wait)
    with pytest.raises(KeyError, match="not made"):
        call(agents[0], "cid", look, rref)
    del rref
    all_forgotten(agents)


def test_a_failed_reference_dies_like_any_other(agents: list[Agent]) -> None:
    rref = remote(agents[0], "bob", fail_to_make)
    with pytest.raises(KeyError):
        rref.to_here()
    ended = weakref.ref(rref)
    del rref
    eventually(lambda: gc.collect() >= 0 and ended() is None, "the reference's end")


making = threading.Event()


def make_slowly() -> Thing:
    making.wait(TIMEOUT_S)
    return Thing(1)


def test_a_value_that_is_not_made_yet(agents: list[Agent]) -> None:
    making.clear()
    rref = remote(agents[0], "bob", make_slowly)
    with pytest.raises(RpcTimeout):
        rref.to_here(timeout=0.05)
    third = agents[0].call_async("cid", look, (rref,), {}, TIMEOUT_S)
    assert not rref.get_future().done()
    making.set()
    assert rref.to_here() == {"number": 1}
    assert bounded(third.wait) == 1
    del rref, third
    all_forgotten(agents)


def test_a_reference_to_tensors(agents: list[Agent]) -> None:
    rref = agents[0].remote("bob", torch.ones, (300_000,), {}, TIMEOUT_S)
    copy = rref.to_here()
    copy.add_(1)
    assert float(rref.to_here().sum()) == 300_000.0  # a copy was changed, not the value
    assert call(agents[0], "cid", float_sum, rref) == 300_000.0


def float_sum(rref: RRef[torch.Tensor]) -> float:
    return float(rref.to_here().sum())


def test_a_reference_is_not_for_pickle(agents: list[Agent]) -> None:
    rref = remote(agents[0], "bob")
    with pytest.raises(RuntimeError, match="pickle"):
        pickle.dumps(rref)


# -- who dies

state: dict[str, Any] = {}


def hold(owner: str, numel: int) -> None:
    state["rref"] = rpc.remote(owner, torch.ones, args=(numel,))
    state["rref"].to_here()


def send_to(to: str) -> None:
    rpc.rpc_sync(to, take, args=(state["rref"],))


def take(rref: Any) -> None:
    state["rref"] = rref


def has_one() -> bool:
    return "rref" in state


def let_go() -> None:
    state.clear()


def owned() -> int:
    return int(rpc.api.current_agent().rrefs.counts()["num_owner_rrefs"])


def value_sum() -> float:
    return float(state["rref"].to_here().sum())


def send_many_and_never_stop(owner: str, to: str) -> None:
    while True:
        rref = rpc.remote(owner, torch.ones, args=(3,))
        rpc.rpc_async(to, take, args=(rref,))


def members() -> int:
    return len(rpc.get_worker_infos())


@pytest.mark.slow
def test_users_and_parents_that_die(workers: Callable[..., Group]) -> None:
    group = workers(4)
    owner, parent, child, other = group
    parent.run(hold, "worker0", 5)
    parent.run(send_to, "worker2")
    child.run(send_to, "worker3")
    parent.kill()
    eventually(lambda: owner.run(members) == 3, "the loss being noticed")
    assert child.run(value_sum) == other.run(value_sum) == 5.0
    child.kill()
    eventually(lambda: owner.run(members) == 2, "the loss being noticed")
    assert owner.run(owned) == 1
    assert other.run(value_sum) == 5.0
    other.run(let_go)
    eventually(lambda: owner.run(owned) == 0, "the value being forgotten")


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(3))
def test_a_parent_that_dies_while_it_hands_references_on(workers: Callable[..., Group], attempt: int) -> None:
    owner, parent, child = group = workers(3)
    parent.start(send_many_and_never_stop, "worker0", "worker2")
    eventually(lambda: owner.run(owned) > 5 * (attempt + 1), "references under way")
    parent.kill()
    eventually(lambda: group[2].run(members) == 2, "the loss being noticed")
    eventually(lambda: child.run(has_one), "one being handed over")
    assert child.run(value_sum) == 3.0  # the one it got last is good

    def nothing_is_owned() -> bool:
        child.run(let_go)  # again and again: calls that arrived before the loss may still be running
        return bool(owner.run(owned) == 0)

    eventually(nothing_is_owned, "every value being forgotten")
