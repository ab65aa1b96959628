"""How a worker comes into a group: it meets the others in the store, and gets through to them."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final

from farstep.errors import AuthenticationError, InsecureTransport, ProtocolError, RpcError, WorkerLost
from farstep.rpc.membership import Card
from farstep.rpc.peer import PeerState

if TYPE_CHECKING:
    from farstep.rpc.handshake import Notice
    from farstep.rpc.links import Links
    from farstep.rpc.membership import OpenRoster
    from farstep.rpc.rounds import Rounds

__all__ = ["Refused", "join_open", "meet"]

MAX_REFUSED: Final = 64
"""So many workers that could not join are remembered, to say why they are not there."""

log = logging.getLogger("farstep.rpc")


def join_open(links: Links, roster: OpenRoster, timeout_s: float) -> None:
    """Come into a group that workers join and leave."""
    others = [links.learn(card) for card in roster.join(timeout_s)]
    deadline = time.monotonic() + timeout_s
    try:
        for peer in others:
            links.dialler.check_reachable(peer.card)
        for peer in others:
            with contextlib.suppress(WorkerLost):
                links.dial(peer, deadline)
    except (InsecureTransport, AuthenticationError) as exc:
        for peer in others:
            links.dialler.tell(peer.card, str(exc))
        raise


def meet(links: Links, rounds: Rounds, timeout_s: float) -> None:
    """Come together with the others of a group of known size."""
    for card in rounds.join(timeout_s):
        links.learn(card)
    deadline = time.monotonic() + timeout_s
    try:
        for peer in links.peers():
            if not peer.is_self:
                links.dialler.check_reachable(peer.card)
        links.watch_next(deadline)
        rounds.settle(deadline, lambda: _first_lost(links))
    except WorkerLost as exc:  # perhaps because it has given up before
        failure = None
        with contextlib.suppress(RpcError):
            failure = rounds.first_failure()
        rounds.fail(exc)
        if failure is not None:
            raise RpcError(f"worker {links.me.name!r} cannot finish init_rpc: {failure}") from exc
        raise
    except BaseException as exc:
        rounds.fail(exc)
        raise


def _first_lost(links: Links) -> str | None:
    lost = [p for p in links.peers() if p.state is not PeerState.PRESENT]
    return str(lost[0].lost_error()) if lost else None


class Refused:
    """Workers that wanted to join and can't talk to this one. See [Note: no common way] in handshake.py."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._why: dict[str | int, str] = {}

    def hear(self, notice: Notice) -> None:
        """A worker says why it can't."""
        try:
            card = Card.from_json(notice.card)
        except ProtocolError:
            return
        me = self._links.me
        if notice.to != me.card.incarnation or card.name in self._why or len(self._why) >= 2 * MAX_REFUSED:
            return
        self._why[card.name] = self._why[card.id] = notice.why
        log.warning("worker %r: %r could not join: %s", me.name, card.name, notice.why)

    def check(self, target: str | int) -> None:
        """InsecureTransport where a worker is missing for that reason."""
        if target in self._why:
            raise InsecureTransport(f"{target!r} could not join the group: {self._why[target]}")

    def forget(self, card: Card) -> None:
        """It has joined after all."""
        self._why.pop(card.name, None)
        self._why.pop(card.id, None)
