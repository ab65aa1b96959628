"""Loading what other workers own: each reads its own part, all at once, after all have looked whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from farstep.checkpoint import rpc_calls
from farstep.checkpoint.elsewhere import Target, agent_of, by_owner, failure
from farstep.checkpoint.filling import Filling
from farstep.checkpoint.manifest import Manifest
from farstep.checkpoint.renaming import Place, Rename, new_name
from farstep.checkpoint.rpc_stopping import Stopped
from farstep.checkpoint.storage import Storage
from farstep.checkpoint.stored_values import read_values
from farstep.checkpoint.tree import decode, joined
from farstep.errors import CheckpointError, CheckpointMismatch, OptimError, RpcError, StateMismatch
from farstep.optim.owners import Outcome, ask_owners

if TYPE_CHECKING:
    from farstep.optim.distributed import DistributedOptimizer
    from farstep.optim.state_dicts import Plan
    from farstep.rpc.agent import Agent
    from farstep.rpc.membership import WorkerInfo

__all__ = ["OwnersLoad"]


class OwnersLoad:
    """The share of a load that other workers have. Its steps are those of `Filling`, on all owners at once."""

    def __init__(
        self,
        filling: Filling,
        target: Target,
        storage: Storage,
        manifest: Manifest,
        strict: bool,
        convert_dtype: bool,
        rename: Rename | None,
        verify: bool,
        rpc_timeout: float,
        agent: Agent | None = None,
    ) -> None:
        """`agent`: for another worker, which has stopped all steps; it loads what has this in
        it."""
        self._filling, self._storage, self._manifest = filling, storage, manifest
        self._strict, self._convert_dtype, self._rename, self._verify = strict, convert_dtype, rename, verify
        self._target = target
        self._agent: Agent = agent or (
            agent_of(filling.references)
            if filling.references
            else next(iter(filling.spread_optimizers.values()))[0]._agent
        )
        self._is_nested = agent is not None
        self._timeout_s = self._agent.effective_timeout(rpc_timeout)
        self._loads: dict[WorkerInfo, Any] = {}
        self._with_others: list[WorkerInfo] = []
        """Owners of things within which there are others'."""
        self._plans: list[tuple[DistributedOptimizer, Plan]] = []
        self._stopped: Stopped | None = None

    def prepare(self) -> None:
        """Stop the optimizers, and look whether all fits; nothing has changed anywhere if that
        raises."""
        optimizers = {name: each for name, (each, _) in self._filling.spread_optimizers.items()}
        try:
            if not self._is_nested:
                self._stopped = Stopped(self._filling.references, optimizers, f"loading from {self._storage}", self._timeout_s, saves=False)  # fmt: skip
            self._prepare_values()
            for name, (optimizer, place) in self._filling.spread_optimizers.items():
                self._prepare_optimizer(optimizer, place, name)
        except BaseException:
            self.drop()
            raise

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Owners read, and this process does what is inside; if one of them fails there is
        nothing to commit."""
        args = {owner: (load, self._timeout_s) for owner, load in self._loads.items()}
        try:
            with ThreadPoolExecutor(1, "farstep-load") as pool:
                reading = pool.submit(copy_context().run, self._ask, rpc_calls.fill, args)
                yield
            outcome = reading.result()
            if outcome.errors:
                raise self._failure(outcome, "did not load its part", "What it has may be partly loaded: load again, or another checkpoint, before it is used")  # fmt: skip
        except BaseException:
            self.drop()
            raise

    def commit(self) -> None:
        try:
            outcome = self._ask(rpc_calls.commit, {owner: (load,) for owner, load in self._loads.items()})
            if outcome.errors:
                raise self._failure(outcome, "did not put in place what it has read", "Load again")
            while self._plans:
                with _as_checkpoint_error(f"{self._storage} was not loaded into all owners of an optimizer"):
                    self._plans[0][0]._commit_load(self._plans[0][1], self._timeout_s)
                del self._plans[0]
            self._loads.clear()
            if self._stopped is not None:
                self._stopped.resume()
        finally:
            self.drop()

    def drop(self) -> None:
        """Owners drop what they have prepared and not put in place, and the steps go on."""
        if self._loads:
            self._ask(rpc_calls.abandon, {owner: (self._loads[owner],) for owner in self._with_others})
        self._loads.clear()
        for optimizer, _ in self._plans:
            optimizer._abandon_load()
        self._plans.clear()
        if self._stopped is not None:
            self._stopped.drop()

    def _prepare_values(self) -> None:
        rename = self._rename
        if rename is not None and not isinstance(
            rename, Mapping
        ):  # a function is not sent, but what it gives
            rename = {place.name: new for new, place in self._filling.index.places.items()}
        args = {
            owner: (
                self._target,
                self._manifest.save,
                entries,
                self._strict,
                self._convert_dtype,
                rename,
                self._verify,
                self._timeout_s,
            )
            for owner, entries in by_owner(self._filling.references).items()
        }
        outcome = self._ask(rpc_calls.prepare, args)
        for owner, (load, _, has_others) in outcome.results.items():
            self._loads[owner] = load
            if has_others:
                self._with_others.append(owner)
        if outcome.errors:
            raise self._failure(outcome, "cannot load its part", "Nothing has been changed")
        report = self._filling.report
        for _, told, _ in outcome.results.values():
            missing, unexpected, reshaped, unsaved, differences = told
            report.missing += missing
            report.unexpected += unexpected
            report.reshaped += reshaped
            report.unsaved += unsaved
            report.differences |= differences

    def _prepare_optimizer(self, optimizer: DistributedOptimizer, place: Place, name: str) -> None:
        states, groups = self._saved(place, name)
        wanted = {each for group in optimizer.param_groups for each in group["param_names"]}
        given = {each for group in groups for each in group["params"]} | states.keys()
        if not self._strict:
            report = self._filling.report
            report.missing += [joined(name, f"state.{each}") for each in sorted(wanted - given)]
            report.unexpected += [joined(name, f"state.{each}") for each in sorted(given - wanted)]
        args = {}
        for info, owner in optimizer._owners.items():
            own = [each for names in owner.names.values() for each in names]
            theirs = {each: states[each] for each in own if each in states}
            args[info] = self._target, self._manifest.save, theirs, self._verify, self._timeout_s
        outcome = self._ask(rpc_calls.read_states, args)
        if outcome.errors:
            raise self._failure(outcome, f"did not read its part of {name!r}", "Nothing has been changed")
        read: dict[str, Any] = dict(states)
        for found in outcome.results.values():
            read |= found
        with _as_checkpoint_error(f"{name!r} of {self._storage} does not fit the optimizer"):
            plan = optimizer._prepare_load(
                {"state": read, "param_groups": groups}, self._strict, self._timeout_s
            )
        if not self._strict:
            self._filling.report.unexpected += [joined(name, each) for each in plan.left_out]
        self._plans.append((optimizer, plan))

    def _saved(self, place: Place, name: str) -> tuple[dict[str, tuple[str, Any]], list[dict[str, Any]]]:
        """Where in the checkpoint the state of each parameter is, and the groups."""
        saved = decode(place.node, place.name)
        if not isinstance(saved, dict) or not {"state", "param_groups"} <= saved.keys():
            raise CheckpointMismatch(
                f"{place.name!r} of {self._storage} is not the state of an optimizer. Nothing has been changed"
            )
        if any(not isinstance(key, str) for key in saved["state"]):
            raise CheckpointMismatch(
                f"{place.name!r} of {self._storage} was saved by the numbers of parameters, and a DistributedOptimizer goes by their names: save it together "
                f"with its model. Nothing has been changed"
            )

        def new(parameter: str) -> str:
            whole = new_name(self._rename, joined(place.name, f"state.{parameter}"))
            head = joined(name, "state.")
            return whole[len(head) :] if whole.startswith(head) else parameter

        nodes = place.node["dict"]["state"]["dict"]
        states = {new(key): (joined(place.name, f"state.{key}"), node) for key, node in nodes.items()}
        groups = read_values(self._storage, self._manifest, saved["param_groups"], verify=self._verify)
        return states, [{**group, "params": [new(each) for each in group["params"]]} for group in groups]

    def _ask(self, function: Callable[..., Any], args: Mapping[WorkerInfo, tuple[Any, ...]]) -> Outcome:
        return ask_owners(self._agent, function, args, self._timeout_s)

    def _failure(self, outcome: Outcome, what: str, after: str) -> CheckpointError:
        return failure(outcome, f"{what} from {self._storage}", after)


@contextmanager
def _as_checkpoint_error(what: str) -> Iterator[None]:
    try:
        yield
    except (OptimError, RpcError) as exc:
        kind = CheckpointMismatch if isinstance(exc, StateMismatch) else CheckpointError
        notes = "; ".join(getattr(exc, "__notes__", ()))
        raise kind(f"{what}: {exc}{f' ({notes})' if notes else ''}") from exc
