"""When an owner may forget a value: exactly when its last user is gone, whether it let go or died. And who may use it till then.

A *fork* is one user's reference. The owner keeps a value while it has forks (or while the owner's own code holds it).

* A user P asks an owner to make a value: REMOTE has the value's id and P's fork, both of P's making.
* The owner sends a reference to C: it writes C's fork down before the message leaves.
* A user S sends one to C: S tells the owner ADD(fork of C), and then sends the message. S's own fork can only be
  deleted after that ADD, because both travel on the one connection from S to the owner. So there is no
  moment at which the owner has no fork of a reference that is on its way, and S need not wait for anything.
* C receives it, tells the owner CONFIRM, and runs the call when the owner has answered. The owner answers when it has the
  ADD, which takes another connection: a CONFIRM that comes first waits for it.
* C lets go: DELETE. It may overtake S's ADD as well; the owner then remembers it until that ADD arrives. S itself may
  withdraw a fork whose message did not leave, as long as C has not confirmed it.
* C dies: the owner drops C's forks. S dies: a fork that S added and C has not confirmed may never have
  reached C. The owner asks C (check), and C answers when it has read all that S ever sent it.

[Note: who holds] A worker *holds* a value while the owner has a fork of it written down for that worker. Holders, and only they, may
fetch the value, send a reference to it home to the owner, and add forks for others; ids and forks belong to the worker whose
rank is in them. An honest worker is never refused. Whatever it says about a reference follows, on its one connection to the owner,
    - its own REMOTE, if it had the value made;
    - what the owner sent it, and wrote down before;
    - or the answer to its CONFIRM, which comes after the ADD: it does not use a reference from a third worker before that;
and comes before its own DELETE, since the reference lives while it is used. Nobody else can delete its fork, once confirmed.

One that is not held is an RRefError for the call that names it, and not the end of the connection: C may have been given a
forged reference, and must not lose its owner by asking. What only the sender can have made up costs it the connection.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from farstep.errors import NotInitialized, ProtocolError, RpcError, RpcTimeout, RRefError, UnknownWorker
from farstep.rpc.membership import WorkerInfo
from farstep.rpc.payload import Refused
from farstep.rpc.rref import Fork, GlobalId, RRef, Value, id_str, owner_rref, user_rref
from farstep.rpc.rref_early import EarlyWords
from farstep.rpc.rref_notes import ForkNote, check_control, check_note
from farstep.rpc.schema import is_fork_list
from farstep.rpc.service import rebuild_error
from farstep.rpc.wire import Kind

if TYPE_CHECKING:
    from farstep.rpc.agent import Agent
    from farstep.rpc.message import Message
    from farstep.rpc.peer import Peer

__all__ = ["RRefTable"]

log = logging.getLogger("farstep.rpc")
MAX_CHECKS: Final = 1024
"""An owner asks once for each worker that is lost."""
Answers = list[tuple["Message", RRefError | None]]


class RRefTable:
    """The references of one agent, as owner and as user."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ids = itertools.count()
        self._owned: dict[GlobalId, Value] = {}
        self._own: weakref.WeakValueDictionary[GlobalId, Value] = weakref.WeakValueDictionary()
        """Values that this worker has asked itself to make, until the request arrives. Its handle keeps them."""
        self._early = EarlyWords()
        self._checks: Counter[int] = Counter()
        self._users: weakref.WeakValueDictionary[GlobalId, RRef[Any]] = weakref.WeakValueDictionary()
        self._dropped: deque[tuple[int, GlobalId, GlobalId]] = deque()
        self._in_creation: set[GlobalId] = set()

    def new_id(self) -> GlobalId:
        return self._agent.info.id, next(self._ids)

    def count_from_anywhere(self) -> None:
        """In a group that can be joined again: an id must not be one of an earlier worker of this rank, which others may still hold."""
        self._ids = itertools.count(secrets.randbits(60))

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
        if rref._kept is not None:
            with self._lock:  # also to oneself: the value must outlive the handle until the message is opened
                fork = self._add_own_fork(rref._kept, to.id)
            return owner.id, owner.name, rref._id, fork, me, True
        rref._check_usable("fork")
        until = self._agent.soon() if deadline is None else deadline
        if rref._awaited is not None:
            rref._await_owner(until)
        if to.id == owner.id:
            return owner.id, owner.name, rref._id, None, me, True
        fork = self.new_id()
        try:
            self._agent.peer(owner.id).post(
                Kind.RREF, 0, ("add", [(rref._id, fork, to.id)]), deadline=until, soon=True
            )
        except RpcTimeout as exc:
            self.let_go(owner.id, rref._id, fork)  # should it arrive after all
            raise RpcTimeout(
                f"the owner of {rref}, {owner.name!r}, cannot be told that it is sent on: {exc}"
            ) from exc
        return owner.id, owner.name, rref._id, fork, me, False

    def _add_own_fork(self, kept: Value, holder: int) -> GlobalId:
        fork = self.new_id()
        kept.add_fork(fork, Fork(holder, self._agent.info.id, confirmed=True))
        self._owned[kept.id] = kept
        return fork

    def unfork(self, notes: list[ForkNote]) -> None:
        """The message with these did not leave."""
        for owner_id, _, id, fork, _, _ in notes:
            if fork is not None:
                self._dropped.append((owner_id, id, fork))
        if notes:
            self._agent.wake()

    def adopt(self, note: Any, peer: Peer) -> RRef[Any] | Refused:
        """The reference of a message that came from `peer`. Called in the order of arrival."""
        owner_id, owner_name, id, fork, _, known = check_note(note, peer, self._agent.info)
        if owner_id != self._agent.info.id:
            assert fork is not None  # for mypy: check_note has looked
            owner = WorkerInfo(owner_name, owner_id)
            return user_rref(self._agent, owner, id, fork, confirmed=known, awaited=not known)
        with self._lock:
            kept = self._owned.get(id)
            if kept is None or not kept.is_held_by(peer.id):
                return Refused(self.not_held(id, peer))
            if fork is not None:  # from oneself: the handle takes over from the fork
                if fork in kept.forks:
                    kept.drop_fork(fork)
                self._forget_if_free(kept)
        return owner_rref(self._agent, kept)

    def not_held(self, id: GlobalId, peer: Peer) -> RRefError:
        return RRefError(
            f"worker {peer.name!r} holds no reference to RRef {id_str(id)} on worker {self._agent.info.name!r}. A worker "
            f"gets one with a call or a result, and may use it until it lets go"
        )

    def confirm(self, rrefs: list[RRef[Any]], then: Callable[[BaseException | None], None]) -> None:
        """Ask the owners of references that a third worker sent; call `then` when all have answered, with the first error."""
        waiting = [len(rrefs)]
        errors: list[BaseException] = []
        lock = threading.Lock()

        def answered(rref: RRef[Any], error: BaseException | None) -> None:
            awaited = rref._awaited
            rref._confirmed = error is None
            rref._pending = False
            if error is None:
                rref._awaited = None
            if awaited is not None:
                awaited.give(error)
            with lock:
                if error is not None:
                    errors.append(error)
                waiting[0] -= 1
                done = waiting[0] == 0
            if done:
                then(errors[0] if errors else None)

        for rref in rrefs:
            try:
                assert rref._fork is not None  # for mypy: it is a user's
                owner = self._agent.peer(rref._owner.id)
                if owner.name != rref._owner.name:
                    raise RRefError(f"{rref} is said to be of {rref._owner}, and that is {owner.name!r}")
                head = ("confirm", [(rref._id, rref._fork, rref._fork[0])])
                self._agent.request(owner, Kind.RREF, head, partial(self._answered, partial(answered, rref)))
            except RpcError as exc:
                answered(rref, exc.with_traceback(None))

    def _answered(
        self,
        then: Callable[[BaseException | None], None],
        message: Message | None,
        error: BaseException | None,
    ) -> None:
        if error is None and message is not None and message.kind == Kind.ERROR:
            error = rebuild_error(message, self._agent.trust)
        then(error)

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

    def begin_own(self, id: GlobalId) -> Value:
        """This worker is about to ask itself to make a value."""
        kept = self._own[id] = Value(id)
        return kept

    def expect(self, id: Any, fork: Any, peer: Peer) -> Value:
        """A peer asks to make a value: its entry is there before anything else is read from that peer."""
        with self._lock:
            if peer.is_self:
                return self._own.pop(id)
            if id[0] != peer.id or fork[0] != peer.id or id in self._owned:
                raise ProtocolError(
                    f"a value whose id is not {peer.name!r}'s to give, or is taken: {id_str(id)}"
                )
            kept = self._owned[id] = Value(id)
            kept.add_fork(fork, Fork(peer.id, peer.id, confirmed=True))
        return kept

    def held(self, id: Any, peer: Peer) -> Value | None:
        """The value of that id, if the peer holds it."""
        with self._lock:
            kept = self._owned.get(id)
            return kept if kept is not None and kept.is_held_by(peer.id) else None

    def control(self, message: Message) -> None:
        """Handle an RREF message. On the reader's thread, in order."""
        verb, items = check_control(message)
        freed: list[Value] = []  # values die outside of the lock: their destructors are the user's code
        answers: Answers = []
        peer = message.peer
        with self._lock:
            if verb == "add":
                for id, fork, holder in items:
                    self._add(id, fork, holder, peer, answers)
            elif verb == "confirm":
                self._confirm(message, items[0][0], items[0][1], answers)
            elif verb == "delete":
                for id, fork in items:
                    self._delete(id, fork, peer.id, freed, answers)
            else:
                self._checks[peer.id] += 1
                if self._checks[peer.id] > MAX_CHECKS:
                    raise ProtocolError(f"worker {peer.name!r} asks after lost workers without end")
            self._changed.notify_all()
        self._answer(answers)
        if verb == "check":
            parent, forks = items
            self._agent.when_gone(parent, lambda: self._answer_check(message, forks))

    def _answer(self, answers: Answers) -> None:
        for message, error in answers:
            if error is None:
                job = partial(self._agent.service.answer, message, None)
            else:
                job = partial(self._agent.service.answer_error, message, error)
            self._agent.submit(0, job, message.peer.control_lane)

    def _answer_check(self, message: Message, forks: list[tuple[GlobalId, GlobalId]]) -> None:
        asker = message.peer.id
        with self._lock:
            self._checks[asker] -= 1
            if not self._checks[asker]:
                del self._checks[asker]
        missing = []
        for id, fork in forks:
            rref = self._users.get(fork)
            if rref is None or rref._id != id or rref._owner.id != asker:
                missing.append((id, fork))
        answer = partial(self._agent.service.answer, message, missing)
        self._agent.submit(0, answer, message.peer.control_lane)

    def _add(self, id: GlobalId, fork: GlobalId, holder: int, peer: Peer, answers: Answers) -> None:
        kept = self._owned.get(id)
        if holder == self._agent.info.id or (kept is not None and fork in kept.forks):
            raise ProtocolError(f"a fork that {peer.name!r} cannot add: for its owner, or a second time")
        waiting, was_deleted = self._early.take(holder, fork)
        if kept is None or not kept.is_held_by(peer.id):
            log.warning("%s", self.not_held(id, peer))
            if waiting is not None:
                answers.append((waiting, self.not_held(id, peer)))
            return
        if not (was_deleted or self._agent.is_gone(holder)):
            kept.add_fork(fork, Fork(holder, peer.id, confirmed=waiting is not None))
        if waiting is not None:
            answers.append((waiting, None))

    def _confirm(self, message: Message, id: GlobalId, fork: GlobalId, answers: Answers) -> None:
        holder, maker = message.peer.id, fork[0]
        kept = self._owned.get(id)
        known = None if kept is None else kept.forks.get(fork)
        if known is not None and known.holder == holder:
            known.confirmed = True
            answers.append((message, None))
        elif (
            known is not None
            or maker in (holder, self._agent.info.id)  # its ADD cannot come after this
            or not self._agent.is_present(maker)
            or not self._early.confirm(holder, fork, message)
        ):
            answers.append((message, self.not_held(id, message.peer)))

    def _delete(
        self, id: GlobalId, fork: GlobalId, teller: int, freed: list[Value], answers: Answers
    ) -> None:
        me, maker = self._agent.info.id, fork[0]
        kept = self._owned.get(id)
        known = None if kept is None else kept.forks.get(fork)
        if kept is None or known is None:
            if maker not in (me, teller) and teller != me and self._agent.is_present(maker):
                waiting = self._early.delete(teller, fork)
                if waiting is not None:
                    answers.append((waiting, self.not_held(id, waiting.peer)))
        elif teller in (me, known.holder) or (teller == known.parent and not known.confirmed):
            kept.drop_fork(fork)
            if self._forget_if_free(kept):
                freed.append(kept)

    def _forget_if_free(self, kept: Value) -> bool:
        if kept.forks:
            return False
        if self._owned.get(kept.id) is kept:
            del self._owned[kept.id]
        return True

    def worker_gone(self, worker: int, name: str) -> None:
        """Drop what a lost worker held, and ask after forks that it alone vouched for."""
        freed: list[Value] = []
        doubtful: dict[int, list[tuple[GlobalId, GlobalId]]] = {}
        with self._lock:
            answers: Answers = [
                (
                    m,
                    RRefError(
                        f"worker {name!r} was lost before it could hand RRef {id_str(m.head[1][0][0])} on"
                    ),
                )
                for m in self._early.worker_gone(worker)
            ]
            for kept in list(self._owned.values()):
                for fork, note in list(kept.forks.items()):
                    if note.holder == worker:
                        kept.drop_fork(fork)
                    elif note.parent == worker and not note.confirmed:
                        doubtful.setdefault(note.holder, []).append((kept.id, fork))
                if self._forget_if_free(kept):
                    freed.append(kept)
            self._changed.notify_all()
        self._answer(answers)
        for holder, forks in doubtful.items():
            hook = partial(self._checked, holder, forks)
            try:
                self._agent.request(self._agent.peer(holder), Kind.RREF, ("check", (worker, forks)), hook)
            except UnknownWorker:
                self._drop(holder, forks)
            except RpcError:
                pass  # the holder is gone too: its own loss drops them

    def _checked(
        self,
        holder: int,
        asked: list[tuple[GlobalId, GlobalId]],
        message: Message | None,
        error: BaseException | None,
    ) -> None:
        """The holder says which of its forks never reached it. It has no say in others'."""
        if message is not None and message.kind == Kind.REPLY:
            missing = message.value(self._agent.trust)
            if is_fork_list(missing):
                theirs = set(asked)
                self._drop(holder, [each for each in missing if each in theirs])

    def _drop(self, holder: int, forks: list[tuple[GlobalId, GlobalId]]) -> None:
        freed: list[Value] = []
        with self._lock:
            for id, fork in forks:
                self._delete(id, fork, holder, freed, [])
            self._changed.notify_all()

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
        for rref in list(self._users.values()):
            if rref._awaited is not None:  # nobody will ask its owner any more
                rref._awaited.give(NotInitialized(f"worker {self._agent.info.name!r} has shut down"))
