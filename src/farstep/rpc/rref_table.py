"""When an owner may forget a value: exactly when its last user is gone, whether it let go or died.

A *fork* is one user's reference. The owner keeps a value while it has forks (or while the owner's own code holds it).

* The owner sends a reference to C: it writes C's fork down before the message leaves.
* A user S sends one to C: S tells the owner ADD(fork of C), and then sends the message. S's own fork can only be
  deleted after that ADD, because both travel on the one connection from S to the owner. So there is no
  moment at which the owner has no fork of a reference that is on its way, and S need not wait for anything.
* C receives it, tells the owner CONFIRM, and runs the call when the owner has answered.
* C lets go: DELETE. It may overtake S's ADD, which takes another connection; the owner then remembers the
  early DELETE until that ADD arrives.
* C dies: the owner drops C's forks. S dies: a fork that S added and C has not confirmed may never have
  reached C. The owner asks C, and C answers when it has read all that S ever sent it.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farstep.errors import RpcError, RpcTimeout, RRefError, WorkerLost
from farstep.rpc.membership import WorkerInfo
from farstep.rpc.rref import GlobalId, RRef, Value, id_str, owner_rref, user_rref
from farstep.rpc.wire import Kind

if TYPE_CHECKING:
    from farstep.rpc.agent import Agent
    from farstep.rpc.message import Message
    from farstep.rpc.peer import Peer

__all__ = ["RRefTable"]

log = logging.getLogger("farstep.rpc")
ForkNote = tuple[int, str, GlobalId, GlobalId | None, int, bool]
"""How a reference travels: owner's rank and name, its id, the receiver's fork (None: the receiver is the owner),
the sender's rank, whether the owner knows of the fork already."""


@dataclass
class Fork:
    holder: int
    parent: int
    confirmed: bool
    added: bool  # whether the ADD has been seen, or none will come


class RRefTable:
    """The references of one agent, as owner and as user."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ids = itertools.count()
        self._owned: dict[GlobalId, Value] = {}
        self._deleted_early: dict[GlobalId, int] = {}
        self._users: weakref.WeakValueDictionary[GlobalId, RRef[Any]] = weakref.WeakValueDictionary()
        self._dropped: deque[tuple[int, GlobalId, GlobalId]] = deque()
        self._in_creation: set[GlobalId] = set()

    def new_id(self) -> GlobalId:
        return self._agent.info.id, next(self._ids)

    # -- sending and receiving references

    def fork(self, rref: RRef[Any], to: Peer, deadline: float | None) -> ForkNote:
        """Just before a message with this reference leaves for `to`."""
        me = self._agent.info.id
        owner = rref._owner
        if rref._agent is not self._agent:
            raise RRefError(
                f"{rref} belongs to worker {rref._agent.info.name!r}, not to {self._agent.info.name!r}"
            )
        if rref._deleted:
            raise RRefError(
                f"{rref} has been deleted by shutdown. Cannot call fork an UserRRef after deletion."
            )
        if to.id == owner.id:
            if (
                rref._kept is not None
            ):  # to oneself: the value must outlive the handle until the message is opened
                with self._lock:
                    fork = self._add_fork(rref._kept, me, me)
                return owner.id, owner.name, rref._id, fork, me, True
            return owner.id, owner.name, rref._id, None, me, True
        if rref._kept is not None:
            with self._lock:
                fork = self._add_fork(rref._kept, to.id, me)
            return owner.id, owner.name, rref._id, fork, me, True
        fork = self.new_id()
        try:
            self._agent.peer(owner.id).post(
                Kind.RREF,
                0,
                ("add", [(rref._id, fork, to.id)]),
                deadline=self._agent.soon() if deadline is None else deadline,
                soon=True,
            )
        except RpcTimeout as exc:
            self.let_go(owner.id, rref._id, fork)  # should it arrive after all
            raise RpcTimeout(
                f"the owner of {rref}, {owner.name!r}, cannot be told that it is sent on: {exc}"
            ) from exc
        return owner.id, owner.name, rref._id, fork, me, False

    def _add_fork(self, kept: Value, holder: int, parent: int) -> GlobalId:
        fork = self.new_id()
        kept.forks[fork] = Fork(holder, parent, True, True)
        self._owned[kept.id] = kept
        return fork

    def unfork(self, notes: list[ForkNote]) -> None:
        """The message with these did not leave."""
        for owner_id, _, id, fork, _, _ in notes:
            if fork is not None:
                self._dropped.append((owner_id, id, fork))
        if notes:
            self._agent.wake()

    def adopt(self, note: ForkNote) -> RRef[Any]:
        """The reference of an arriving message. Called in the order of arrival."""
        owner_id, owner_name, id, fork, _, known = note
        if owner_id == self._agent.info.id:
            with self._lock:
                kept = self._owned.get(id)
                if kept is None:
                    kept = self._owned[id] = Value(id)
                    kept.expected_from = id[0]
                if fork is not None:  # from oneself: the handle takes over from the fork
                    kept.forks.pop(fork, None)
                    self._forget_if_free(kept)
            return owner_rref(self._agent, kept)
        if fork is None:
            raise RRefError(f"a reference to RRef {id_str(id)} came without a fork")
        return user_rref(self._agent, WorkerInfo(owner_name, owner_id), id, fork, confirmed=known)

    def confirm(self, rrefs: list[RRef[Any]], parent: int, then: Any) -> None:
        """Tell the owners of references that a third worker sent; call `then` when all have answered."""
        waiting = [len(rrefs)]
        lock = threading.Lock()

        def answered(rref: RRef[Any], error: BaseException | None) -> None:
            rref._confirmed = error is None
            rref._pending = False
            with lock:
                waiting[0] -= 1
                done = waiting[0] == 0
            if done:
                then()

        for rref in rrefs:
            head = ("confirm", [(rref._id, rref._fork, parent)])
            hook = _tell(answered, rref)
            try:
                self._agent.request(self._agent.peer(rref._owner.id), Kind.RREF, head, hook)
            except RpcError as exc:
                answered(rref, exc)

    def creating(self, rref: RRef[Any]) -> None:
        """A user asked an owner to make this value."""
        if rref._fork is not None:
            rref._pending = True
            self._in_creation.add(rref._fork)

    def created(self, fork: GlobalId, *, confirmed: bool, failure: str | None) -> None:
        """The owner answered, or did not in time."""
        self._in_creation.discard(fork)
        rref = self._users.get(fork)
        if rref is not None:
            rref._pending = False
            rref._confirmed = confirmed
            rref._not_created = failure

    # -- letting go

    def register_user(self, rref: RRef[Any]) -> None:
        if rref._fork is not None:
            self._users[rref._fork] = rref

    def let_go(self, owner_id: int, id: GlobalId, fork: GlobalId) -> None:
        """From a finalizer: only queue it, and have a thread send it."""
        self._dropped.append((owner_id, id, fork))
        self._agent.wake()

    @property
    def has_dropped(self) -> bool:
        return bool(self._dropped)

    def send_dropped(self) -> None:
        """Tell the owners of what was let go."""
        by_owner: dict[int, list[tuple[GlobalId, GlobalId]]] = {}
        while self._dropped:
            try:
                owner_id, id, fork = self._dropped.popleft()
            except IndexError:
                break
            by_owner.setdefault(owner_id, []).append((id, fork))
        for owner_id, forks in by_owner.items():
            try:
                owner = self._agent.peer(owner_id)
                owner.post(Kind.RREF, 0, ("delete", forks), deadline=self._agent.soon(), soon=True)
            except RpcTimeout:
                self._dropped.extend((owner_id, id, fork) for id, fork in forks)
            except RpcError:
                pass  # the owner is gone, and the value with it

    def delete_all_users(self) -> None:
        """At shutdown: no reference of this worker's may be used any more."""
        for rref in list(self._users.values()):
            fork = rref._fork
            if fork is not None and not rref._deleted:
                rref._deleted = True
                self._dropped.append((rref._owner.id, rref._id, fork))
        self.send_dropped()

    # -- as owner

    def expect(self, id: GlobalId, fork: GlobalId | None, holder: int) -> Value:
        """A peer asks to make a value: its entry is there before anything else is read from that peer.

        Without a fork this worker asks itself, and its own handle keeps the value.
        """
        with self._lock:
            kept = self._owned.get(id)
            if kept is None:
                kept = self._owned[id] = Value(id)
            kept.expected_from = None
            if fork is not None:
                kept.forks[fork] = Fork(holder, holder, True, True)
            self._forget_if_free(kept)
        return kept

    def find(self, id: GlobalId) -> Value:
        """The value of that id; waits to be made if it is not here yet."""
        with self._lock:
            kept = self._owned.get(id)
            if kept is None:
                kept = self._owned[id] = Value(id)
                kept.expected_from = id[0]
            return kept

    def control(self, message: Message) -> None:
        """Handle an RREF message. On the reader's thread, in order."""
        verb, items = message.head
        freed: list[Value] = []  # values die outside of the lock: their destructors are the user's code
        peer = message.peer
        with self._lock:
            if verb == "add":
                for id, fork, holder in items:
                    self._add(id, fork, holder, peer.id, freed)
            elif verb == "confirm":
                for id, fork, parent in items:
                    self._confirm(id, fork, peer.id, parent)
            elif verb == "delete":
                for id, fork in items:
                    self._delete(id, fork, peer.id, freed)
            self._changed.notify_all()
        if verb == "confirm":
            self._agent.submit(0, lambda: self._agent.service.answer(message, None), peer.control_lane)
        elif verb == "check":
            parent, forks = items
            self._agent.when_gone(parent, lambda: self._answer_check(message, forks))
        elif verb not in ("add", "delete"):
            raise RpcError(f"worker {peer.name!r} sent an unknown reference message {verb!r}")

    def _answer_check(self, message: Message, forks: list[tuple[GlobalId, GlobalId]]) -> None:
        missing = [(id, fork) for id, fork in forks if fork not in self._users]
        answer = self._agent.service.answer
        self._agent.submit(0, lambda: answer(message, missing), message.peer.control_lane)

    def _add(self, id: GlobalId, fork: GlobalId, holder: int, parent: int, freed: list[Value]) -> None:
        if self._deleted_early.pop(fork, None) is not None or not self._agent.is_present(holder):
            return
        kept = self._known_or_expected(id)
        if kept is None:
            return
        known = kept.forks.get(fork)
        if known is None:
            kept.forks[fork] = Fork(holder, parent, False, True)
        else:
            known.added = True

    def _confirm(self, id: GlobalId, fork: GlobalId, holder: int, parent: int) -> None:
        kept = self._known_or_expected(id)
        if kept is None:
            return
        known = kept.forks.get(fork)
        if known is None:
            kept.forks[fork] = Fork(holder, parent, True, False)
        else:
            known.confirmed = True

    def _delete(self, id: GlobalId, fork: GlobalId, holder: int, freed: list[Value]) -> None:
        kept = self._owned.get(id)
        if kept is None:
            return
        known = kept.forks.pop(fork, None)
        if (known is None or not known.added) and self._agent.is_present(fork[0]):
            self._deleted_early[fork] = fork[
                0
            ]  # the ADD is still on its way from the worker that made the fork
        if self._forget_if_free(kept):
            freed.append(kept)

    def _known_or_expected(self, id: GlobalId) -> Value | None:
        """Word of a reference may overtake the call that makes its value, which another worker has sent."""
        kept = self._owned.get(id)
        if kept is None and id[0] != self._agent.info.id and self._agent.is_present(id[0]):
            kept = self._owned[id] = Value(id)
            kept.expected_from = id[0]
        return kept

    def _forget_if_free(self, kept: Value) -> bool:
        if kept.forks or kept.expected_from is not None:
            return False
        self._owned.pop(kept.id, None)
        return True

    def worker_gone(self, worker: int, name: str) -> None:
        """Drop what a lost worker held, fail what it was to make, and ask after forks that it alone vouched for."""
        freed: list[Value] = []
        failed: list[Value] = []
        doubtful: dict[int, list[tuple[GlobalId, GlobalId]]] = {}
        with self._lock:
            for fork in [f for f, parent in self._deleted_early.items() if parent == worker]:
                del self._deleted_early[fork]
            for kept in list(self._owned.values()):
                for fork, note in list(kept.forks.items()):
                    if note.holder == worker:
                        del kept.forks[fork]
                    elif note.parent == worker and not note.confirmed:
                        doubtful.setdefault(note.holder, []).append((kept.id, fork))
                if kept.expected_from == worker:
                    kept.expected_from = None
                    failed.append(kept)
                if self._forget_if_free(kept):
                    freed.append(kept)
            self._changed.notify_all()
        for kept in failed:
            kept.set(error=WorkerLost(name, "it was lost before the value of this RRef was made"))
        for holder, forks in doubtful.items():
            try:
                peer = self._agent.peer(holder)
                self._agent.request(peer, Kind.RREF, ("check", (worker, forks)), self._checked(holder))
            except RpcError:
                pass  # the holder is gone too: its own loss drops them

    def _checked(self, holder: int) -> Any:
        def hook(message: Message | None, error: BaseException | None) -> None:
            if message is None:
                return
            freed: list[Value] = []
            with self._lock:
                for id, fork in message.value(self._agent.trust):
                    self._delete(id, fork, holder, freed)
                self._changed.notify_all()

        return hook

    # -- what is left

    def wait_until_unowned(self, timeout_s: float) -> bool:
        """At shutdown, after all have let go: wait for their word to arrive."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while any(v.forks for v in self._owned.values()):
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return False
        return True

    def leaks(self) -> list[str]:
        """The references that some worker still holds on a value of this one."""
        with self._lock:
            return [
                f"{id_str(v.id)} (held by rank {f.holder})"
                for v in self._owned.values()
                for f in v.forks.values()
            ]

    def counts(self) -> dict[str, int]:
        with self._lock:
            return {
                "num_owner_rrefs": len(self._owned),
                "num_forks": sum(len(v.forks) for v in self._owned.values()),
                "num_pending_users": sum(r._pending for r in list(self._users.values())),
                "num_pending_futures": len(self._in_creation),
            }

    def clear(self) -> None:
        with self._lock:
            owned, self._owned = self._owned, {}
            self._in_creation.clear()
        owned.clear()


def _tell(answered: Any, rref: RRef[Any]) -> Any:
    return lambda message, error: answered(rref, error)
