"""One step for all that is saved or loaded: DistributedOptimizers take no step meanwhile,
whichever workers have them.

First every owner of a reference says what it has in there: references of other owners, and
optimizers. Then the optimizers are stopped, worker after worker in one order, so that two saves do
not wait for each other. For a save each then gives its state, of which the owners of its
parameters have made copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from farstep.checkpoint import rpc_calls
from farstep.checkpoint.elsewhere import agent_of, by_owner, failure, is_below
from farstep.errors import CheckpointError
from farstep.optim.owners import Outcome, ask_owners

if TYPE_CHECKING:
    from farstep.optim.distributed import DistributedOptimizer
    from farstep.rpc.membership import WorkerInfo
    from farstep.rpc.rref import RRef

__all__ = ["Stopped"]

_MOST_ROUNDS = 20


class Stopped:
    """From when it is made to `resume`, or `drop`, which says nothing of what went on."""

    def __init__(
        self,
        references: Mapping[str, RRef[Any]],
        optimizers: Mapping[str, DistributedOptimizer],
        doing: str,
        rpc_timeout: float,
        *,
        saves: bool,
    ) -> None:
        self.references: dict[str, RRef[Any]] = {}
        """What was found in what owners have."""
        self.copies: set[str] = set()
        """Of these, those of copies that were made for this."""
        self.states: Mapping[str, Any] = {}
        """Of the optimizers that this process has, by name."""
        self.looks: dict[WorkerInfo, RRef[rpc_calls.Look]] = {}
        self._after = f"Nothing has been {'saved' if saves else 'changed'}"
        self._doing = doing
        agents = {each._agent for each in optimizers.values()}
        agents |= {agent_of(references)} if references else set()
        if len(agents) != 1:
            raise CheckpointError(f"the state has references of {len(agents)} agents. {self._after}")
        self._agent = agents.pop()
        self._timeout_s = self._agent.effective_timeout(rpc_timeout)
        self._stopping: set[WorkerInfo] = set()
        self._asked: dict[WorkerInfo, set[str]] = {}
        """The names of what each owner was asked about."""
        try:
            self._look(references)
            if optimizers:
                self._take_own(optimizers)
            for owner in sorted(self._stopping, key=lambda each: each.id):
                self._stop(owner, saves)
        except BaseException:
            self.drop()
            raise

    def resume(self) -> None:
        """Steps go on. Raises CheckpointError if some did before."""
        outcome = self._ask(rpc_calls.resume, {owner: (self.looks[owner],) for owner in self._stopping})
        self.drop()
        if outcome.errors:
            raise failure(outcome, "was lost while its optimizer took no steps", self._after)
        early = sorted(owner.name for owner, was_stopped in outcome.results.items() if not was_stopped)
        if early:
            raise CheckpointError(
                f"{self._doing} took so long that {', '.join(early)} went on training before it "
                f"was done, so this is not the state of one step: rpc_timeout= gives more "
                f"time. {self._after}"
            )

    def drop(self) -> None:
        """Owners that have stopped something let it go on when nobody refers to it any more."""
        self._stopping.clear()
        self.looks.clear()

    def _look(self, references: Mapping[str, RRef[Any]]) -> None:
        wanted = by_owner(references)
        for _ in range(_MOST_ROUNDS):
            if not wanted:
                return
            for owner, entries in wanted.items():
                self._asked.setdefault(owner, set()).update(name for name, _ in entries)
            outcome = self._ask(rpc_calls.look, {o: (self.looks.get(o), each) for o, each in wanted.items()})
            if outcome.errors:
                raise failure(outcome, f"cannot take part in {self._doing}", self._after)
            nested: dict[str, RRef[Any]] = {}
            for owner, (look, inner, has_optimizers) in outcome.results.items():
                self.looks[owner] = look
                if has_optimizers:
                    self._stopping.add(owner)
                nested |= self._found(owner, inner, {name for name, _ in wanted[owner]})
            wanted = by_owner(nested)
        raise CheckpointError(
            f"{next(iter(nested))[:200]!r} is a reference in a reference, and so on without end. "
            f"{self._after}"
        )

    def _take_own(self, optimizers: Mapping[str, DistributedOptimizer]) -> None:
        own = self._agent.info
        if own not in self.looks:
            self.looks[own] = self._ask(rpc_calls.look, {own: (None, [])}).results[own][0]
        look: rpc_calls.Look = self.looks[own].local_value()
        look.optimizers.update(optimizers)
        self._asked.setdefault(own, set()).update(optimizers)
        self.states = look.states
        self._stopping.add(own)

    def _stop(self, owner: WorkerInfo, saves: bool) -> None:
        who = f"{self._doing} by worker {self._agent.info.name!r}"
        args = (self.looks[owner], who, self._timeout_s, saves)
        outcome = self._ask(rpc_calls.stop_steps, {owner: args})
        if outcome.errors:
            raise failure(outcome, f"did not stop its optimizer for {self._doing}", self._after)
        for name, states in outcome.results[owner].items():
            if not is_below(name, self._asked[owner]):
                raise self._other_things(owner)
            self.copies |= self._found(owner, states, {name}).keys()

    def _found(self, owner: WorkerInfo, found: Any, heads: set[str]) -> dict[str, RRef[Any]]:
        """Noted, if all are within what the owner was asked about."""
        new = dict(found)
        for name in new:
            if name in heads or name in self.references or not is_below(name, heads):
                raise self._other_things(owner)
        self.references |= new
        return new

    def _other_things(self, owner: WorkerInfo) -> CheckpointError:
        return CheckpointError(
            f"worker {owner.name!r} speaks of other things than it was asked about. {self._after}"
        )

    def _ask(self, function: Callable[..., Any], args: Mapping[WorkerInfo, tuple[Any, ...]]) -> Outcome:
        return ask_owners(self._agent, function, args, self._timeout_s)
