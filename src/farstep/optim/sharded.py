"""ShardedOptimizer: any torch optimizer over parameters that are spread over ranks, or whose state is to be."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from farstep.dist import operation
from farstep.errors import OptimError
from farstep.optim import adapters, fast, scaling, sharded_state, sharded_step
from farstep.optim.elementwise import ELEMENTWISE
from farstep.optim.groups import Group, parse_group, parse_groups
from farstep.optim.members import Local, Member, Part, kind_of, member_of
from farstep.optim.named_groups import NAMED
from farstep.optim.sharded_checks import check_replicas, refuse_class
from farstep.optim.sharded_clip import coefficient_of, norm_of, of_all_ranks
from farstep.optim.sharded_part import ShardedPart, init_state
from farstep.optim.sharded_seats import check_group, seat_of
from farstep.optim.state_dicts import name_of_class
from farstep.optim.zero import Zero
from farstep.state.council import agree
from farstep.state.neighbours import Neighbours
from farstep.state.optim_seats import Seat

__all__ = ["ShardedOptimizer"]

BUCKET_BYTES = 16 << 20
SHARD = ("auto", "state", "none", "local")


class ShardedOptimizer(ShardedPart):
    """`optimizer_class` on this rank's part of every parameter.

    DTensors and ShardedTensors are spread already: each rank updates its local shards, as with torch's class of this name. An ordinary replicated model,
    as DistributedDataParallel has it, gets its optimizer state spread over the ranks: each rank owns an equal range of all elements, receives
    the mean of the gradients for it, updates it, and sends the new values to the others (ZeRO-1).

    Args:
        named_params: a mapping of names to Tensor, ShardedTensor or DTensor, such as `dict(model.named_parameters())`; (name, parameter) pairs; or a
            list of groups, dicts with such "params" and options of their own. The same on every rank.
        optimizer_class, args, kwargs: the optimizer, and what it is given beside the parameters.
        process_group: the ranks that share these parameters; all ranks of the job if it is None.
        shard: "state" spreads the state of plain tensors over the ranks; "none" has every rank step all of them by itself; "auto" does the former if
            there are several ranks and plain tensors only, else the latter, as torch's class does. "local": plain tensors are parts of
            parameters, other ones on each rank, as under FSDP1 with use_orig_params=True.
        reduce_gradients: of plain tensors whose state is spread. True: `.grad` is this rank's own, and their mean is used; right in any case.
            False: they are means already, as under DistributedDataParallel, which saves sending them.
        elementwise: whether the class treats every element by itself. If it is None, that is known of torch's classes and not believed of others, which own
            whole parameters instead of equal ranges.
        bucket_bytes: how much of the parameters travels at once.
        same_host: whether ranks read each other's memory instead of sending messages. None: where they can, that is, on one host whose rules allow it.
            True raises where they cannot.

    Every rank makes it, steps, clips, loads and saves at the same time as the others: these communicate.
    """

    _step_supports_amp_scaling = True
    """torch.amp.GradScaler calls `step` in any case, since other ranks may wait for it. See `scaling`."""

    @operation("ShardedOptimizer")
    def __init__(
        self,
        named_params: Any,
        optimizer_class: Callable[..., Optimizer],
        *args: Any,
        process_group: dist.ProcessGroup | None = None,
        shard: str = "auto",
        reduce_gradients: bool = True,
        elementwise: bool | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        same_host: bool | None = None,
        **kwargs: Any,
    ) -> None:
        if shard not in SHARD:
            raise ValueError(f"shard is one of {', '.join(SHARD)}, not {shard!r}")
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is at least 1, not {bucket_bytes}")
        if isinstance(named_params, type) or not callable(optimizer_class):
            raise TypeError(
                f"ShardedOptimizer(named_params, optimizer_class, ...): parameters with names first, then a class such as torch.optim.AdamW, and its "
                f"arguments; not a {type(named_params).__name__} and a {type(optimizer_class).__name__}"
            )
        groups = parse_groups(named_params, NAMED)
        self.process_group = process_group
        self._is_ready = False
        self._make = optimizer_class
        self._reduce_gradients, self._bucket_bytes = reduce_gradients, bucket_bytes
        self._same_host = same_host
        kind = optimizer_class.func if isinstance(optimizer_class, functools.partial) else optimizer_class
        self._elementwise = elementwise if elementwise is not None else kind in ELEMENTWISE
        self._kind = kind
        self._ranks = dist.get_world_size(process_group) if dist.is_initialized() else 1
        if self._ranks < 1:
            raise OptimError(
                f"rank {dist.get_rank()} of the job is not in process_group: only the ranks of the group make this optimizer"
            )
        self._is_local = shard == "local"
        is_plain = all(kind_of(p) == "Tensor" for group in groups for p in group.params)
        self._spreads_state = self._ranks > 1 and (shard == "state" or (shard == "auto" and is_plain))
        if self._ranks > 1:
            refuse_class(kind, elementwise, groups, self._spreads_state, self._is_local)
        self._members: list[list[Member]] = []
        """Of each group."""
        self._zeros: list[Zero] = []
        self._chosen: list[dict[str, bool]] = []
        """Of each group: what is set during a step. See `fast`."""
        self._settled: dict[int, Any] = {}
        """How each shadow lay in memory when that was chosen."""
        members, zeros = self._take(groups)
        given: list[Any] = [
            {"params": shadows, **group.options}
            for shadows, group in zip(_shadows(members), groups, strict=True)
        ]
        if not any(each["params"] for each in given):  # torch takes no optimizer without parameters
            given[0]["params"] = [torch.nn.Parameter(torch.empty(0))]
        if len(given) == 1 and len(given[0]) == 1:
            given = given[0]["params"]  # some classes take nothing else
        self._inner = optimizer_class(given, *args, **kwargs)
        if not isinstance(self._inner, Optimizer):
            raise TypeError(
                f"{optimizer_class!r} made a {type(self._inner).__name__}, and not a torch.optim.Optimizer"
            )
        if len(self._inner.param_groups) != len(groups):
            raise OptimError(
                f"{name_of_class(optimizer_class)} has put the parameters into groups of its own, so that neither options nor state could be told "
                f"apart. Give the groups to ShardedOptimizer: [{{'params': ..., 'lr': ...}}, ...]"
            )
        if not any(_shadows(members)):
            self._inner.state.clear()  # what some classes have at once, here of the placeholder
        super().__init__([{"params": []}], self._inner.defaults)
        self._members, self._zeros = members, zeros
        self._adopt(groups)
        self._is_ready = True

    # -- groups -------------------------------------------------------------------------------------------

    @property
    def named_params(self) -> dict[str, Any]:
        """Name -> parameter, as they were given."""
        return {m.name: m.parameter for members in self._members for m in members}

    @operation("ShardedOptimizer.add_param_group")
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group: "params" as in the constructor, and options. On all ranks, as everything else."""
        if not self._is_ready:
            return  # torch's constructor
        known = [
            Group([m.name for m in members], [m.parameter for m in members], {}) for members in self._members
        ]
        group = parse_group(param_group, known, NAMED)
        members, zeros = self._take([group], len(self._members))
        new = {"params": _shadows(members)[0], "param_names": group.names, **group.options}
        self._inner.add_param_group(new)
        self._members += members
        self._zeros += zeros
        self._adopt([group])

    def _take(self, groups: list[Group], first: int = 0) -> tuple[list[list[Member]], list[Zero]]:
        """The parameters of new groups as members, once all ranks are known to have the same."""
        check_replicas(self.process_group, self._arguments(), groups, self._spreads_state, self._is_local)
        flat = [
            (number, name, p)
            for number, group in enumerate(groups, first)
            for name, p in zip(group.names, group.params, strict=True)
        ]
        spread = [each for each in flat if self._spreads_state and kind_of(each[2]) == "Tensor"]
        parts: dict[str, Member] = {}
        zeros = []
        if spread:
            numbers, names, parameters = zip(*spread, strict=True)
            zero = Zero(
                names,
                parameters,
                numbers,
                self.process_group,
                bucket_bytes=self._bucket_bytes,
                elementwise=self._elementwise,
                piecewise=self._kind in ELEMENTWISE,
                reduce_gradients=self._reduce_gradients,
                neighbours=self._neighbours(parameters),
            )
            zeros.append(zero)
            parts = {name: Part(zero, i, self.process_group) for i, name in enumerate(names)}
        members: list[list[Member]] = [[] for _ in groups]
        for number, name, parameter in flat:
            member = parts.get(name) or member_of(name, parameter, self.process_group, self._is_local)
            members[number - first].append(member)
        return members, zeros

    def _neighbours(self, parameters: Sequence[Tensor]) -> Neighbours | None:
        if self._same_host is False or any(p.device.type != "cpu" for p in parameters):
            return None
        found = Neighbours.of(self.process_group)
        if found is None and self._same_host:
            raise OptimError(
                "same_host=True, and the ranks cannot read each other's memory: they are on several hosts, belong to several users, or a rule such as "
                "kernel.yama.ptrace_scope forbids it. Leave same_host out, and they send messages"
            )
        return found

    def _arguments(self) -> dict[str, str]:
        """In words that can be compared."""
        return {
            "the optimizer class": name_of_class(self._make),
            "shard": "local" if self._is_local else "used" if self._spreads_state else "not used",
            "elementwise": str(self._elementwise),
            "reduce_gradients": str(self._reduce_gradients),
            "bucket_bytes": str(self._bucket_bytes),
            "same_host": str(self._same_host),
        }

    def _adopt(self, groups: list[Group]) -> None:
        """Make the inner optimizer's groups this one's: the same dicts, with the user's parameters instead of shadows, except during a step."""
        self.param_groups = self._inner.param_groups
        self.state = self._inner.state
        for group, named in zip(self.param_groups[-len(groups) :], groups, strict=True):
            group["params"] = list(named.params)
            group["param_names"] = list(named.names)
        self._settle()

    def _adopt_all(self) -> None:
        """After a load, which has put new groups and a new state in place."""
        self._adopt(
            [
                Group([m.name for m in members], [m.parameter for m in members], {})
                for members in self._members
            ]
        )

    def _settle(self) -> None:
        self._settled = {id(s): (s.shape, s.stride()) for shadows in _shadows(self._members) for s in shadows}
        self._chosen = [
            fast.choose(self._inner, {**group, "params": shadows})
            for group, shadows in zip(self.param_groups, _shadows(self._members), strict=True)
        ]

    # -- steps --------------------------------------------------------------------------------------------

    @adapters.runs_its_hooks
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, on all ranks at once. Returns what `closure` returned, which is called first, once.

        A parameter that has no gradient on any rank is left alone. One that has on some counts as zero on the others. An exception on one rank, of
        the optimizer class, of a hook or of the closure, is an OptimError on the others.
        """
        with torch.autograd.profiler.record_function(f"Optimizer.step#{type(self).__name__}.step"):
            try:
                with operation("ShardedOptimizer.step"):
                    return sharded_step.step(self, closure)
            except BaseException:
                scaling.forget(self)
                raise

    def _update(self, given: Mapping[int, list[Tensor]]) -> None:
        if any(self._settled.get(id(s)) != (s.shape, s.stride()) for each in given.values() for s in each):
            self._settle()  # `.data` has been set to something else, which the state may not fit
        with self._showing(given), fast.only_what_fused_takes(self._inner):
            self._inner.step()

    @contextmanager
    def _showing(self, given: Mapping[int, list[Tensor]]) -> Iterator[None]:
        """The inner optimizer sees these parameters, and the fastest implementation chosen."""
        before = []
        for number, (group, chosen) in enumerate(zip(self.param_groups, self._chosen, strict=True)):
            before.append({"params": group["params"], **{key: group.get(key) for key in chosen}})
            group["params"] = given.get(number, [])
            group.update({key: value for key, value in chosen.items() if group.get(key) is None})
        try:
            yield
        finally:
            for group, old in zip(self.param_groups, before, strict=True):
                group.update(old)

    def _showing_all(self) -> AbstractContextManager[None]:
        return self._showing(dict(enumerate(_shadows(self._members))))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters, local shards too."""
        for zero in self._zeros:
            zero.forget()
        for members in self._members:
            for member in members:
                member.zero_grad(set_to_none)

    @operation("ShardedOptimizer.clip_grad_norm_")
    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Make the gradients of all ranks together no longer than `max_norm`, as torch's function of this name does in one process. Returns their norm.

        Each element counts once, however many ranks have it. It comes after the last backward pass and right before `step`. Where gradients are still
        to be reduced it does that, and leaves the means in those parts of `.grad` that this rank owns; the rest is of no more use.
        """
        if not isinstance(max_norm, int | float | Tensor):
            raise TypeError(
                f"max_norm is a number, not a {type(max_norm).__name__}: clip_grad_norm_(max_norm) takes no parameters, it clips all of this optimizer's"
            )
        norm_type = float(norm_type)
        total, gradients = self._norm_and_gradients(float(max_norm), norm_type)
        norm = norm_of(total, norm_type).to(self._norm_dtype())
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients is non-finite, so it cannot "
                f"be clipped. To disable this error and scale the gradients by "
                f"the non-finite norm anyway, set error_if_nonfinite=False"
            )
        self._scale_gradients(gradients, coefficient_of(norm, max_norm))
        return norm

    def _norm_and_gradients(self, max_norm: float, norm_type: float) -> tuple[Tensor, list[Tensor]]:
        """What all ranks' gradients add to a norm, see `sharded_clip`; and those that this rank
        would scale."""
        options = {"max_norm": str(max_norm), "norm_type": str(norm_type)}
        own = [part for zero in self._zeros for part in zero.reduce(options)]
        others = [
            (member, gradient)
            for members in self._members
            for member in members
            if not isinstance(member, Part)
            for gradient in member.gradients()
        ]
        counted = [gradient for member, gradient in others if member.counts()]
        total = of_all_ranks([*own, *counted], norm_type, self.process_group)
        return total, [*own, *(gradient for _, gradient in others)]

    def _scale_gradients(self, gradients: list[Tensor], coefficient: Tensor) -> None:
        for gradient in gradients:
            gradient.mul_(coefficient.to(gradient.device, gradient.dtype))
        for zero in self._zeros:
            zero.remember()

    def _norm_dtype(self) -> torch.dtype:
        """The same on all ranks, whichever parameters they have a part of."""
        kinds = [m.parameter.dtype.to_real() for members in self._members for m in members]
        return functools.reduce(torch.promote_types, kinds) if kinds else torch.float32

    # -- state --------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ShardedOptimizer is neither copied nor pickled: it belongs to a process group and to parameters. Save its state_dict(), and load that into another"
        )

    @operation("ShardedOptimizer.state_dict")
    def state_dict(
        self, *, full: bool = False, rank0_only: bool = False, cpu_offload: bool = False
    ) -> dict[str, Any]:
        """The state by parameter name: `{"state": {name: ...}, "param_groups": [...]}`. All ranks call it.

        By default each rank gets its own part, without copies: DTensors for DTensors, ShardedTensors for ShardedTensors, `farstep.state.Shards` for a range of a
        replicated parameter. With `full` they are whole plain tensors, gathered into place, on every rank or, with `rank0_only`, on the first; the
        others get an empty dict. `cpu_offload` has them in main memory.
        """
        if rank0_only and not full:
            raise ValueError(
                "rank0_only=True goes with full=True: without it every rank has a part of its own, and all are needed"
            )
        error = _error_of(lambda: adapters.run_state_dict_pre_hooks(self))
        found = sharded_state.read(self, full, rank0_only, cpu_offload, error)
        with self._all_or_none("saving the optimizer's state"):
            found = adapters.run_state_dict_post_hooks(self, found)
        return found

    @operation("ShardedOptimizer.load_state_dict")
    def load_state_dict(
        self, state_dict: Any, *, strict: bool = True, broadcast_from_rank0: bool = False
    ) -> None:
        """Load what `state_dict` gave, here or on any other number of ranks, full or not. All ranks call it.

        Each rank gives what it has: a full state, its own part, or a list of the parts that several ranks had saved. Together they must have everything.
        With `broadcast_from_rank0` only the first rank has a state, and that of others is not looked at. With `strict` the names must be the same as the
        optimizer's; else parameters without a saved state keep theirs. If it raises, nothing has been changed on any rank.
        """
        given = state_dict

        def run_hooks() -> None:
            nonlocal given
            if isinstance(given, Mapping):
                given = adapters.run_load_state_dict_pre_hooks(self, dict(given))

        error = _error_of(run_hooks)
        sharded_state.prepare(self, given, strict, broadcast_from_rank0, error)()
        with self._all_or_none("what comes after a load"):
            self._after_load()

    @operation("ShardedOptimizer.init_state")
    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        """Make the state that the first step would make, for parameters that have none, so that it can be loaded in place. All ranks call it.

        Parameters, gradients, options and counters stay as they are, and training goes on as it would have without. Frozen parameters get no
        state. Some classes take the learning rate into their state: make schedulers before.
        """
        sparse = set(sparse_grad_parameter_names or ())
        unknown = sorted(sparse - self.named_params.keys())
        if unknown:
            raise ValueError(f"sparse_grad_parameter_names has names of no parameter: {', '.join(unknown)}")
        init_state(self, sparse)

    @contextmanager
    def _all_or_none(self, doing: str) -> Iterator[None]:
        """If it fails on one rank, all raise."""
        error = None
        try:
            yield
        except Exception as exc:
            error = exc
        agree(error, self.process_group, doing, kind=OptimError)

    def optim_seats(self, group: dist.ProcessGroup | None) -> dict[int, Seat]:
        """For farstep.state: id of each parameter -> how its state is spread, where that is known here."""
        check_group(self.process_group, group)
        members = [m for members in self._members for m in members if not isinstance(m, Local)]
        return {id(m.parameter): seat_of(m) for m in members}

    def optim_stepper(self) -> Optimizer:
        return self._inner

    def optim_state_loaded(self) -> None:
        self._settle()

    def __repr__(self) -> str:
        return f"ShardedOptimizer of {self._inner!r}"


def _shadows(members: list[list[Member]]) -> list[list[Tensor]]:
    return [[shadow for member in each for shadow in member.shadows] for each in members]


def _error_of(run: Callable[[], None]) -> Exception | None:
    try:
        run()
    except Exception as exc:
        return exc
    return None
