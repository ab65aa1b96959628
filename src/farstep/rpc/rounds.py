"""How a group of known size meets in the rendezvous store, also in one where others have met before.

A store may outlive the workers: torchrun serves one for all attempts of a job. So workers meet in rounds, and the key `round` says which one is
open. In a round each rank has a claim (the incarnation of the worker that came with it) and a card.

- Whoever finds its rank claimed asks the holder. While that answers it is DuplicateName; when it does not, it belongs to an
  earlier attempt, and so does the round: the newcomer opens the next one. See [Note: taking over] in membership.py.
- Whoever waits in a round that is no longer open moves to the open one.
- The last to arrive asks all others whether they are still there, before it lets everyone go on. Some may have
  come with an earlier attempt.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from farstep.errors import AuthenticationError, DuplicateName, InitTimeout, ProtocolError, RpcError
from farstep.rpc.membership import Answers, Card
from farstep.rpc.rendezvous import MAX_REASON_CHARS, AskedStore
from farstep.rpc.stores import Store

__all__ = ["Rounds", "tell_failure"]

LOOK_S: Final = 0.5
CARD_S: Final = 1.0
"""Between claiming a rank and writing its card a worker does nothing else: one without a card after this has died."""
MAX_WORLD: Final = 1 << 20
ASKED_AT_ONCE: Final = 16
FIRST_ROUND_PAUSE_S: Final = 0.05
LONGEST_ROUND_PAUSE_S: Final = 0.5


class _NextRound(Exception):
    """Another round is open now."""


class Rounds:
    """One worker's use of the store in a group of known size."""

    def __init__(self, store: AskedStore, card: Card, world_size: int, answers: Answers) -> None:
        self._store = store
        self._card = card
        self._world_size = world_size
        self._answers = answers
        self._round = 0
        self._dead: dict[int, str] = {}
        """Of earlier rounds: rank -> name. They did not answer any more."""

    def join(self, timeout_s: float) -> list[Card]:
        """Announce this worker and return the cards of all, by rank."""
        deadline = time.monotonic() + timeout_s
        pause_s = FIRST_ROUND_PAUSE_S
        self._round = _open_round(self._store)
        while True:
            try:
                self._enter(timeout_s)
                return self._collect(deadline)
            except _NextRound:
                if time.monotonic() + pause_s >= deadline:
                    raise InitTimeout(self._who_is_missing()) from None
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_ROUND_PAUSE_S)
                self._round = _open_round(self._store)

    # -- entering a round

    def _enter(self, timeout_s: float) -> None:
        """Claim this worker's rank and write its card. `_NextRound` where the round is of an earlier attempt."""
        me = self._card
        self._check_size()
        claim = self._key(f"claim/{me.id}")
        if not self._store.check([claim]):
            self._check_earlier_failure(timeout_s)
        holder = self._store.compare_set(claim, "", me.incarnation)
        if holder != me.incarnation:
            self._check_holder(holder)
            self._open_next()
        self._write_card()
        if self._store.add(self._key("arrived"), 1) >= self._world_size:
            self._ask_all()
            self._store.set(self._key("all-here"), "1")

    def _write_card(self) -> None:
        key = self._key(f"worker/{self._card.id}")
        self._store.set(key, json.dumps(self._card.to_json()))
        try:
            if Card.parse(self._store.get(key)) != self._card:
                raise self._other_writer(self._card.id)
        except RpcError as exc:
            self.fail(exc)
            raise

    def _check_size(self) -> None:
        mine = str(self._world_size)
        held = self._store.compare_set(self._key("size"), "", mine)
        if held == mine:
            return
        if not held.isdecimal() or not 0 < int(held[:10]) <= MAX_WORLD:
            raise RpcError(
                f"worker {self._card.name!r} finds {held[:40]!r} as the size of the group in the rendezvous store: somebody "
                f"else writes there"
            )
        for rank in range(int(held)):
            key = self._key(f"worker/{rank}")
            if self._store.check([key]):
                card = Card.parse(self._store.get(key))
                if self._answers(card):
                    error = RpcError(
                        f"worker {self._card.name!r} has world_size {mine}, and {card.name!r} (rank {rank}) is there with "
                        f"world_size {held}: give all workers of a group the same"
                    )
                    self.fail(error)
                    raise error
                self._dead[rank] = card.name
        self._open_next()

    def _check_holder(self, holder: str) -> None:
        """DuplicateName where the worker that has this one's rank is still there."""
        rank = self._card.id
        key = self._key(f"worker/{rank}")
        try:
            self._store.wait([key], time.monotonic() + CARD_S)
        except TimeoutError:
            return
        try:
            card = Card.parse(self._store.get(key))
        except ProtocolError as exc:
            raise DuplicateName(f"rank {rank} is not unique: another worker has it, and {exc}") from exc
        if card.incarnation != holder or self._answers(card):
            raise DuplicateName(
                f"rank {rank} is not unique: worker {card.name!r} has it already, and is still there; "
                f"{self._card.name!r} wants it too"
            )
        self._dead[rank] = card.name

    def _check_earlier_failure(self, timeout_s: float) -> None:
        """A worker of this attempt may have failed before this one came, and one of an earlier attempt long ago."""
        failure = self._read_failure()
        if failure is None:
            return
        is_of_this_attempt = (
            failure.get("attempt") in (None, _attempt())
            and failure.get("rank") != self._card.id
            and abs(time.time() - failure.get("at", time.time())) < timeout_s
        )
        if is_of_this_attempt:
            raise RpcError(f"worker {self._card.name!r} cannot finish init_rpc: {failure['text']}")
        self._open_next()

    def _ask_all(self) -> None:
        """This worker came last: see that the others are still there."""
        others = []
        for rank in range(self._world_size):
            with contextlib.suppress(ProtocolError):  # all of them will say so
                if rank != self._card.id:
                    others.append(Card.parse(self._store.get(self._key(f"worker/{rank}"))))
        if not others:
            return
        with ThreadPoolExecutor(min(ASKED_AT_ONCE, len(others)), "farstep-asking") as threads:
            gone = [
                c for c, there in zip(others, threads.map(self._answers, others), strict=True) if not there
            ]
        if gone:
            self._dead.update({card.id: card.name for card in gone})
            self._open_next()

    def _open_next(self) -> None:
        self._store.compare_set("round", str(self._round), str(self._round + 1))
        raise _NextRound

    # -- in a round

    def _collect(self, deadline: float) -> list[Card]:
        me = self._card
        keys = [self._key(f"worker/{rank}") for rank in range(self._world_size)]
        while True:
            try:
                self._store.wait([*keys, self._key("all-here")], min(deadline, time.monotonic() + LOOK_S))
                break
            except (RuntimeError, OSError):
                if time.monotonic() >= deadline:
                    raise InitTimeout(self._who_is_missing()) from None
                self._check_failures(float("inf"), lambda: None)
                if _open_round(self._store) != self._round:
                    raise _NextRound from None
        cards = [Card.parse(self._store.get(key)) for key in keys]
        # Rank 0 may serve the store: it stays until all have read it, also when it is about to raise.
        if self._store.add(self._key("collected"), 1) == self._world_size:
            self._store.set(self._key("all-collected"), "1")
        if me.id == 0:
            try:
                self._store.wait([self._key("all-collected")], max(deadline, time.monotonic() + 1.0))
            except (RuntimeError, OSError):
                pass
        for rank, card in enumerate(cards):
            if card.id != rank or (rank == me.id and card != me):
                raise self._other_writer(rank)
        names = [c.name for c in cards]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            ranks = [c.id for c in cards if c.name == twice[0]]
            raise DuplicateName(f"worker name {twice[0]!r} is not unique: ranks {ranks} have it")
        return cards

    def settle(self, deadline: float, who_is_lost: Callable[[], str | None]) -> None:
        """Nobody goes on before everyone has got through to its neighbour."""
        if self._store.add(self._key("ready"), 1) == self._world_size:
            self._store.set(self._key("all-ready"), "1")
        while True:
            try:
                self._store.wait([self._key("all-ready")], min(deadline, time.monotonic() + LOOK_S))
                return
            except (RuntimeError, OSError):
                self._check_failures(deadline, who_is_lost)

    def _check_failures(self, deadline: float, who_is_lost: Callable[[], str | None]) -> None:
        try:
            failed = self.first_failure()
        except (RuntimeError, OSError):
            failed = "the rendezvous store, which rank 0 serves, is gone"
        failed = failed or who_is_lost()
        if failed:
            raise RpcError(f"worker {self._card.name!r} cannot finish init_rpc: {failed}")
        if time.monotonic() >= deadline:
            raise InitTimeout(
                f"worker {self._card.name!r} has met all the others, but not all of them got through to each other"
            )

    def first_failure(self) -> str | None:
        """Why another worker of this round does not come, where one has said so."""
        failure = self._read_failure()
        return None if failure is None else str(failure["text"])

    def _read_failure(self) -> dict[str, Any] | None:
        key = self._key("failed")
        return _parse_failure(self._store.get(key)) if self._store.check([key]) else None

    def fail(self, error: BaseException) -> None:
        """Tell the others why this worker does not come."""
        with contextlib.suppress(RuntimeError, OSError):
            record = _failure(self._card.name, self._card.id, error)
            self._store.compare_set(self._key("failed"), "", record)  # the first cause stays

    def _who_is_missing(self) -> str:
        here, missing = [], []
        for rank in range(self._world_size):
            key = self._key(f"worker/{rank}")
            try:
                present = self._store.check([key])
            except RuntimeError:
                return f"worker {self._card.name!r} lost the rendezvous store (rank 0 serves it) before all had arrived"
            if present:
                here.append(Card.parse(self._store.get(key)).name)
            else:
                missing.append(rank)
        text = (
            f"worker {self._card.name!r} waited at init_rpc: {len(here)} of {self._world_size} have arrived "
            f"({', '.join(here)}); missing: rank {', '.join(map(str, missing))}"
        )
        if self._dead:
            dead = ", ".join(f"{name!r} (rank {rank})" for rank, name in sorted(self._dead.items()))
            text += f". There before, and without an answer since: {dead}"
        return text

    def _other_writer(self, rank: int) -> AuthenticationError:
        return AuthenticationError(
            f"worker {self._card.name!r} finds a card for rank {rank} in the rendezvous store that this rank did not write: "
            f"somebody else writes there. Give the group a store of its own, on a network that only it can reach"
        )

    def _key(self, name: str) -> str:
        return _key(self._round, name)


def tell_failure(store: Store, name: str, rank: int, error: BaseException) -> None:
    """Tell the others of a group of known size why a worker does not come, which has not entered any round."""
    with contextlib.suppress(RuntimeError, OSError):
        asked = AskedStore(store, name)
        number = _open_round(asked)
        if asked.check(
            [_key(number, f"claim/{rank}")]
        ):  # an earlier attempt's: the others will open the next
            number += 1
        asked.compare_set(_key(number, "failed"), "", _failure(name, rank, error))


def _open_round(store: AskedStore) -> int:
    held = store.compare_set("round", "", "0")
    if not held.isdecimal() or len(held) > 9:
        raise RpcError(
            f"the rendezvous store has {held[:40]!r} as its round: something that is not a worker writes there"
        )
    return int(held)


def _key(number: int, name: str) -> str:
    return name if number == 0 else f"round/{number}/{name}"


def _attempt() -> str:
    """Which attempt of a job this is, as far as torchrun tells. Nodes may count differently."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "")


def _failure(name: str, rank: int, error: BaseException) -> str:
    text = f"{name!r} gave up: {error}"[:MAX_REASON_CHARS]
    return json.dumps({"text": text, "rank": rank, "attempt": _attempt(), "at": time.time()})


def _parse_failure(data: bytes) -> dict[str, Any]:
    """What a worker wrote about its failure; what is no such record is the text."""
    try:
        record = json.loads(data) if len(data) <= 8 * MAX_REASON_CHARS else None
        types = {"text": str, "rank": int, "attempt": str, "at": float}
        if type(record) is dict and {name: type(value) for name, value in record.items()} == types:
            return {**record, "text": record["text"][:MAX_REASON_CHARS]}
    except (ValueError, RecursionError):
        pass
    return {"text": data[: 4 * MAX_REASON_CHARS].decode(errors="replace")[:MAX_REASON_CHARS]}
