"""A peer with the secret and references that are not its own: it reads, keeps, frees and forges nothing of others'."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from support.workers import bounded, eventually

from farstep import rpc
from farstep.errors import RpcTimeout, RRefError, WorkerLost
from farstep.rpc import Agent, RRef
from farstep.rpc.group import join_group
from farstep.rpc.payload import Packed, pack
from farstep.rpc.rref import user_rref
from farstep.rpc.wire import Kind

from .hostile import ask, heard, is_lost, names, say, tell

PATIENCE_S = 10.0
ANN, BOB, CID, MAL = range(4)
kept: dict[str, Any] = {}
ran: list[str] = []


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    kept.clear()
    ran.clear()
    with rpc.local_agents(4, names=["ann", "bob", "cid", "mal"]) as agents:
        for agent in agents:
            for other in agents:
                call(agent, other.info.name, len, [])
        yield agents
        kept.clear()


def call(agent: Agent, to: str, function: Any, *args: Any) -> Any:
    return agent.call_sync(to, function, args, {}, PATIENCE_S)


def secret() -> str:
    return "the secret of ann"


def look(rref: RRef[Any]) -> Any:
    ran.append(rpc.get_worker_info().name)
    return rref.local_value() if rref.is_owner() else rref.to_here()


def send_on(rref: RRef[Any], to: str) -> Any:
    return rpc.rpc_sync(to, look, args=(rref,))


def keep(rref: Any) -> None:
    kept[rpc.get_worker_info().name] = rref


def give() -> Any:
    return kept[rpc.get_worker_info().name]


def secret_of_ann(agents: list[Agent]) -> RRef[Any]:
    rref = agents[ANN].remote("bob", secret, (), {}, PATIENCE_S)
    assert rref.to_here() == secret()
    return rref


def goes_on(agents: list[Agent]) -> None:
    """The honest ones have one another, and references work between them."""
    for agent in agents[:MAL]:
        assert {"ann", "bob", "cid"} <= set(names(agent))
    rref = secret_of_ann(agents)
    assert call(agents[ANN], "cid", send_on, rref, "bob") == secret()
    assert call(agents[ANN], "cid", identity, rref).to_here() == secret()


def identity(x: Any) -> Any:
    return x


def call_with(note: Any, function: Any, *args: Any) -> tuple[tuple[str, str], Packed, list[Any]]:
    """The parts of a call whose first argument is a reference that is described like this."""
    packed = pack((Slot(), *args))
    return (function.__module__, function.__qualname__), Packed(packed.body, (), [], []), [note]


class Slot:
    """Arrives as the reference in slot 0."""

    def __reduce__(self) -> Any:
        from farstep.rpc.payload import ref_slot

        return ref_slot, (0,)


def send_forged(agents: list[Agent], to: str, note: Any, function: Any, *args: Any) -> Any:
    head, packed, refs = call_with(note, function, *args)
    return tell(agents[MAL], to, Kind.CALL, head, packed, refs=refs)


# -- reading and keeping what is another's


def test_a_guessed_id_fetches_nothing(agents: list[Agent]) -> None:
    rref = secret_of_ann(agents)
    with pytest.raises(RRefError, match="'mal' holds no reference"):
        ask(agents[MAL], "bob", Kind.FETCH, rref._id)
    assert rref.to_here() == secret()
    goes_on(agents)


def test_a_reference_that_is_not_held_does_not_go_home(agents: list[Agent]) -> None:
    rref = secret_of_ann(agents)
    note = (BOB, "bob", rref._id, None, MAL, True)
    with pytest.raises(RRefError, match="'mal' holds no reference"):
        agents[MAL].answer_to(send_forged(agents, "bob", note, look))
    assert ran == []
    goes_on(agents)


def test_nor_does_it_in_a_result(agents: list[Agent]) -> None:
    """bob calls mal, which answers with a reference to ann's value: bob must not work with it in mal's name."""
    rref = secret_of_ann(agents)
    forged = user_rref(agents[MAL], agents[BOB].info, rref._id, (MAL, 7), confirmed=True)
    kept["mal"] = forged
    with pytest.raises(RRefError, match="'mal' holds no reference"):
        call(agents[BOB], "mal", give)
    goes_on(agents)


@pytest.mark.parametrize("confirms", [False, True], ids=["add", "add and confirm"])
def test_nobody_adds_itself_to_the_holders(agents: list[Agent], confirms: bool) -> None:
    rref = secret_of_ann(agents)
    fork = (MAL, 99)
    say(agents[MAL], "bob", Kind.RREF, ("add", [(rref._id, fork, MAL)]))
    if confirms:
        with pytest.raises(RRefError):
            ask(agents[MAL], "bob", Kind.RREF, ("confirm", [(rref._id, fork, MAL)]))
    with pytest.raises(RRefError):
        ask(agents[MAL], "bob", Kind.FETCH, rref._id)
    assert agents[BOB].rrefs.counts()["num_forks"] == 1
    del rref
    eventually(lambda: gc.collect() >= 0 and not any(agents[BOB].rrefs.counts().values()), "the value's end")


def test_a_confirmation_without_its_sender_makes_nobody_a_holder(agents: list[Agent]) -> None:
    """mal claims that ann has sent it a reference. ann never told the owner so."""
    rref = secret_of_ann(agents)
    waiting = tell(agents[MAL], "bob", Kind.RREF, ("confirm", [(rref._id, (ANN, 500), ANN)]))
    with pytest.raises(RRefError):
        ask(agents[MAL], "bob", Kind.FETCH, rref._id)
    del rref
    eventually(lambda: gc.collect() >= 0 and not any(agents[BOB].rrefs.counts().values()), "the value's end")
    assert not waiting.done
    agents[ANN].close()
    with pytest.raises(RRefError, match="'ann' was lost"):
        agents[MAL].answer_to(waiting)


# -- freeing what is another's


def test_nobody_deletes_anothers_fork(agents: list[Agent]) -> None:
    rref = secret_of_ann(agents)
    call(agents[ANN], "cid", keep, rref)
    forks = [(value.id, fork) for value in agents[BOB].rrefs._owned.values() for fork in value.forks]
    assert len(forks) == 2
    say(agents[MAL], "bob", Kind.RREF, ("delete", forks))
    say(agents[MAL], "bob", Kind.RREF, ("delete", [(rref._id, (ANN, n)) for n in range(100)]))
    heard(agents[MAL], "bob")
    assert agents[BOB].rrefs.counts()["num_forks"] == 2
    assert rref.to_here() == secret()
    assert call(agents[ANN], "cid", send_kept_on, "ann") == secret()
    goes_on(agents)


def send_kept_on(to: str) -> Any:
    return rpc.rpc_sync(to, look, args=(give(),))


def test_a_delete_in_advance_does_not_undo_anothers_fork(agents: list[Agent]) -> None:
    """mal deletes the forks that ann will make next, before ann has made them."""
    rref = secret_of_ann(agents)
    say(agents[MAL], "bob", Kind.RREF, ("delete", [(rref._id, (ANN, n)) for n in range(2, 50)]))
    heard(agents[MAL], "bob")
    for _ in range(10):
        call(agents[ANN], "cid", keep, rref)
        assert call(agents[ANN], "cid", look_at_kept) == secret()
    goes_on(agents)


def look_at_kept() -> Any:
    return look(give())


def test_the_sender_does_not_take_back_what_was_confirmed(agents: list[Agent]) -> None:
    rref = agents[MAL].remote("bob", secret, (), {}, PATIENCE_S)
    call(agents[MAL], "cid", keep, rref)
    fork = call(agents[MAL], "cid", give_fork)
    say(agents[MAL], "bob", Kind.RREF, ("delete", [(rref._id, fork), (rref._id, rref._fork)]))
    heard(agents[MAL], "bob")
    assert call(agents[ANN], "cid", look_at_kept) == secret()


def give_fork() -> Any:
    return give()._fork


# -- ids of others'


def test_an_id_belongs_to_its_maker(agents: list[Agent]) -> None:
    """mal has a value made under the id that ann will use next."""
    coming = (ANN, 0)
    head = (("builtins", "str"), coming, (MAL, 5))
    say(agents[MAL], "bob", Kind.REMOTE, head, pack(("mine",)), call_id=77)
    is_lost(agents[BOB], "mal")
    rref = secret_of_ann(agents)
    assert rref._id == coming
    goes_on(agents)


@pytest.mark.parametrize(
    "head",
    [
        (("builtins", "str"), (MAL, 5), (ANN, 5)),
        (("builtins", "str"), (BOB, 5), (MAL, 5)),
        (("builtins", "str"), [], (MAL, 5)),
        (("builtins", "str"), (MAL, "5"), (MAL, 5)),
    ],
    ids=["another's fork", "the owner's id", "no id", "no number"],
)
def test_so_does_a_fork(agents: list[Agent], head: Any) -> None:
    say(agents[MAL], "bob", Kind.REMOTE, head, pack(("mine",)), call_id=77)
    is_lost(agents[BOB], "mal")
    goes_on(agents)


def test_an_id_is_given_once(agents: list[Agent]) -> None:
    rref = agents[MAL].remote("bob", secret, (), {}, PATIENCE_S)
    assert rref.to_here() == secret()
    say(agents[MAL], "bob", Kind.REMOTE, (("builtins", "str"), rref._id, (MAL, 500)), pack(("x",)), call_id=9)
    is_lost(agents[BOB], "mal")
    goes_on(agents)


def test_words_about_values_that_are_not_there_leave_nothing_behind(agents: list[Agent]) -> None:
    for number in range(50):
        id = (ANN, 1000 + number)
        say(agents[MAL], "bob", Kind.RREF, ("add", [(id, (MAL, number), CID)]))
        say(agents[MAL], "bob", Kind.RREF, ("delete", [(id, (MAL, number))]))
        with pytest.raises(RRefError):
            ask(agents[MAL], "bob", Kind.FETCH, id)
    assert not any(agents[BOB].rrefs.counts().values())
    assert len(agents[BOB].rrefs._early) == 0
    goes_on(agents)


def test_a_worker_that_comes_back_makes_values_of_its_own() -> None:
    """A value of an earlier worker with the same rank may still be held under an id that it gave."""
    store = dist.HashStore()
    with open_group() as joined:
        owner, first, third = (joined(store, name, rank) for rank, name in enumerate(("own", "one", "three")))
        rref = first.remote("own", str, ("of the first",), {}, PATIENCE_S)
        call(first, "three", keep, rref)
        first.close()
        eventually(lambda: "one" not in names(owner) and "one" not in names(third), "the first one leaving")
        second = joined(store, "one", 1)
        again = second.remote("own", str, ("of the second",), {}, PATIENCE_S)
        assert again.to_here() == "of the second"
        assert call(owner, "three", look_at_kept) == "of the first"
        kept.clear()


class open_group:
    """Agents of an open group, closed at the end."""

    def __enter__(self) -> Any:
        self._agents: list[Agent] = []
        return self._join

    def _join(self, store: Any, name: str, rank: int) -> Agent:
        self._agents.append(join_group(store, name, rank, None))
        return self._agents[-1]

    def __exit__(self, *_: object) -> None:
        for agent in self._agents:
            agent.close()


# -- forged references


WHO, ID, FORK = (BOB, "bob"), (ANN, 3), (MAL, 9)
FORGED = {
    "an id that is none": (*WHO, [], FORK, MAL, False),
    "an id of another size": (*WHO, (1, 2, 3), FORK, MAL, False),
    "an id of text": (*WHO, ("a", "b"), FORK, MAL, False),
    "an id with a truth value": (*WHO, (True, 3), FORK, MAL, False),
    "a negative id": (*WHO, (-1, 3), FORK, MAL, False),
    "an endless id": (*WHO, (1 << 4000, 3), FORK, MAL, False),
    "a fork that is none": (*WHO, ID, {}, MAL, False),
    "no fork": (*WHO, ID, None, MAL, False),
    "a fork of another's": (*WHO, ID, (CID, 9), MAL, False),
    "a fork of the owner's": (*WHO, ID, (BOB, 9), MAL, False),
    "in another's name": (*WHO, ID, FORK, CID, False),
    "confirmed by hearsay": (*WHO, ID, FORK, MAL, True),
    "an owner of text": ("bob", "bob", ID, FORK, MAL, False),
    "an owner without a name": (BOB, None, ID, FORK, MAL, False),
    "its own, not confirmed": (MAL, "mal", ID, FORK, MAL, False),
    "its own, by another name": (MAL, "bob", ID, FORK, MAL, True),
    "the receiver's, by another name": (ANN, "bob", ID, None, MAL, True),
    "the receiver's, with a fork": (ANN, "ann", ID, FORK, MAL, True),
    "too short": (*WHO, ID, FORK, MAL),
    "no note": None,
    "a list": [*WHO, ID, FORK, MAL, False],
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_reference_costs_only_the_one_who_sent_it(agents: list[Agent], name: str) -> None:
    """ann is asked to send it on to cid: what ann sends must be in order, or cid would take ann for the liar."""
    send_forged(agents, "ann", FORGED[name], send_on, "cid")
    is_lost(agents[ANN], "mal")
    assert ran == []
    goes_on(agents)


def test_a_forged_name_of_the_owner_is_an_error(agents: list[Agent]) -> None:
    for note in ((BOB, "cid", ID, FORK, MAL, False), (77, "eve", ID, FORK, MAL, False)):
        with pytest.raises((RRefError, ValueError)):
            agents[MAL].answer_to(send_forged(agents, "ann", note, send_on, "cid"))
    assert ran == []
    goes_on(agents)


def test_a_fork_that_was_made_for_another_is_an_error(agents: list[Agent]) -> None:
    """mal gives ann what it gave cid before. Neither must ann lose the owner by asking, nor cid its reference."""
    rref = agents[MAL].remote("bob", secret, (), {}, PATIENCE_S)
    call(agents[MAL], "cid", keep, rref)
    fork = call(agents[MAL], "cid", give_fork)
    for _ in range(3):
        with pytest.raises(RRefError, match="'ann' holds no reference"):
            agents[MAL].answer_to(
                send_forged(agents, "ann", (*WHO, rref._id, fork, MAL, False), send_on, "cid")
            )
    assert ran == []
    assert call(agents[ANN], "cid", look_at_kept) == secret()
    goes_on(agents)


def test_a_reference_whose_sender_never_tells_the_owner_holds_up_only_its_own_call(
    agents: list[Agent],
) -> None:
    for number in range(20):
        send_forged(agents, "ann", (*WHO, (ANN, number), (MAL, number), MAL, False), look)
    heard(agents[MAL], "ann")
    goes_on(agents)
    agents[MAL].close()
    eventually(lambda: len(agents[BOB].rrefs._early) == 0, "the owner forgetting what was promised")
    assert "ann" not in ran


def test_words_in_advance_are_bounded_and_cost_nobody_else(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farstep.rpc.rref_early.MAX_EARLY", 100)
    rref = secret_of_ann(agents)
    for number in range(1000):
        say(
            agents[MAL],
            "bob",
            Kind.RREF,
            ("confirm", [(rref._id, (ANN, 10_000 + number), ANN)]),
            call_id=number + 1,
        )
        say(agents[MAL], "bob", Kind.RREF, ("delete", [(rref._id, (CID, 10_000 + number))]))
    heard(agents[MAL], "bob")
    assert len(agents[BOB].rrefs._early) <= 200
    goes_on(agents)


# -- honest workers wait where they must


def test_a_reference_from_a_third_worker_may_be_used_when_its_owner_knows(agents: list[Agent]) -> None:
    """The owner has not read yet what ann told it; cid has the reference already."""
    _, bob, cid, _ = agents
    rref = secret_of_ann(agents)
    kept["ann"] = rref
    reads_ann = bob.peer("ann").receiver
    assert reads_ann is not None
    assert bounded(reads_ann.read_lock.acquire)
    try:
        got = call(cid, "ann", give)
        assert not got.confirmed_by_owner()
        with pytest.raises(RpcTimeout, match="has not confirmed in time"):
            got.to_here(timeout=0.1)
        with pytest.raises(RpcTimeout):
            cid.call_sync("mal", look, (got,), {}, 0.1)
    finally:
        reads_ann.read_lock.release()
        bob.inbox.arm(bob.peer("ann"), reads_ann)
    assert got.to_here() == secret()
    assert call(cid, "mal", look, got) == secret()
    assert got.confirmed_by_owner()


def test_a_reference_that_is_lost_on_its_way_is_an_error(agents: list[Agent]) -> None:
    """ann dies before its word has reached the owner: cid's call is not run with a reference that may lead nowhere."""
    _, bob, cid, mal = agents
    waiting = tell(cid, "bob", Kind.RREF, ("confirm", [((MAL, 1), (MAL, 2), MAL)]))
    heard(cid, "bob")
    mal.close()
    with pytest.raises(RRefError, match="'mal' was lost"):
        cid.answer_to(waiting)
    assert "cid" in names(bob)


def test_the_owner_is_lost_while_a_reference_is_confirmed(agents: list[Agent]) -> None:
    _, bob, cid, mal = agents
    pending = send_forged(agents, "ann", (*WHO, ID, FORK, MAL, False), look)
    eventually(lambda: len(bob.rrefs._early) == 1, "the question reaching the owner")
    bob.close()
    with pytest.raises((RRefError, WorkerLost)):
        mal.answer_to(pending)
    assert ran == []
    assert call(cid, "ann", len, []) == 0


# -- messages about references that say nonsense

NONSENSE: dict[str, Any] = {
    "no verb": ([], []),
    "an unknown verb": ("steal", []),
    "a deep verb": ("add", "x" * 100),
    "an add for the owner": ("add", [((MAL, 0), (MAL, 1), BOB)]),
    "an add in another's name": ("add", [((MAL, 0), (ANN, 1), CID)]),
    "an add of lists": ("add", [[(MAL, 0), (MAL, 1), CID]]),
    "an add without an id": ("add", [([], (MAL, 1), CID)]),
    "an add for nobody": ("add", [((MAL, 0), (MAL, 1), "cid")]),
    "a delete of nothing": ("delete", [(None, None)]),
    "a delete without an end": ("delete", 5),
    "a confirm without a call": ("confirm", [((MAL, 0), (ANN, 1), ANN)]),
    "a check of nothing": ("check", None),
    "a check of lists": ("check", (0, [[0, 1]])),
    "no pair": ("add",),
    "nothing": None,
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_about_references_costs_its_sender(agents: list[Agent], name: str) -> None:
    say(agents[MAL], "bob", Kind.RREF, NONSENSE[name])
    is_lost(agents[BOB], "mal")
    goes_on(agents)


@pytest.mark.parametrize("id", [None, [], 5, (1,), ("a", 1), (1.0, 2), ((1, 2), 3)], ids=repr)
def test_fetching_by_something_that_is_no_id_costs_its_sender(agents: list[Agent], id: Any) -> None:
    say(agents[MAL], "bob", Kind.FETCH, id, call_id=5)
    is_lost(agents[BOB], "mal")
    goes_on(agents)


def test_asking_after_the_living_without_end_costs_its_sender(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farstep.rpc.rref_table.MAX_CHECKS", 20)
    for number in range(30):
        say(agents[MAL], "bob", Kind.RREF, ("check", (ANN, [])), call_id=number + 1)
    is_lost(agents[BOB], "mal")
    goes_on(agents)
