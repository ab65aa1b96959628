"""The optimizer's state of replicated parameters, spread over ranks: each rank updates what it owns, and the others get the new values.

An owner works on shadows of its segments, which share the parameters' memory. With a class that treats every element by itself, segments are parts
of parameters and a piece is updated as soon as its gradient is there. Other classes own whole parameters, and step once, when all gradients are there.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version

from farstep.dist import waiting
from farstep.errors import OptimError
from farstep.optim import fast
from farstep.optim.agreement import check_same
from farstep.optim.direct import Direct
from farstep.optim.partition import Extent, Segment, divide
from farstep.optim.transport import Rounds, Transport
from farstep.state import Box, Shards, Spread, flat_boxes
from farstep.state.council import agree
from farstep.state.kept import keep
from farstep.state.neighbours import Neighbours

__all__ = ["STEP", "Census", "Notes", "Update", "Zero"]

CACHED_BYTES = 4 << 20
"""Pieces that are read from memory are best no larger: what was read is still in the cache when it is used."""

STEP = "the step"
TORN = (
    "Every rank has the same parameters, but that rank's part of them, and of the state, was not updated or not wholly, and the others' was: load "
    "both from a checkpoint"
)

Update = Callable[[Mapping[int, list[Tensor]]], None]
"""Runs the optimizer on these of its parameters, by the number of their group."""


@dataclass(frozen=True)
class Notes:
    """What a rank has to say at the beginning of a step, or all together."""

    error: Exception | None = None
    """What keeps this rank from stepping."""
    found_inf: bool = False
    """Whether a scaler has found any in its gradients, so that nobody steps."""
    has_hooks: bool = False
    """Whether it has hooks that run after the step."""


@dataclass(frozen=True)
class Census(Notes):
    """Of all ranks."""

    has_gradient: Sequence[bool] = ()
    """Which parameters have one on any."""


class Zero:
    """`numbers` are the parameters' groups. All ranks of the process group have the same parameters, in the same order."""

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        numbers: Sequence[int],
        group: dist.ProcessGroup | None,
        *,
        bucket_bytes: int,
        elementwise: bool,
        piecewise: bool,
        reduce_gradients: bool,
        neighbours: Neighbours | None = None,
    ) -> None:
        self.names, self.parameters, self.numbers = names, parameters, numbers
        self._group, self._elementwise, self._reduce = group, elementwise, reduce_gradients
        self._piecewise = elementwise and piecewise
        """Whether a step may be many steps of the optimizer, each of some parameters."""
        self._kinds = [_kind(p) for p in parameters]
        self._rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        extents = [
            Extent(
                p.numel(),
                p.element_size(),
                (number, p.dtype, p.device),
                whole=not elementwise,
                in_one_piece=not p.is_contiguous(),
            )
            for p, number in zip(parameters, numbers, strict=True)
        ]
        if neighbours is not None:
            piece_bytes = min(bucket_bytes, CACHED_BYTES)
            self._owned = divide(extents, ranks, piece_bytes)
            self._transport: Transport = Direct(group, self._owned, names, neighbours)
        else:
            # A rank has a buffer for each other rank, so that memory stays the same however many there are.
            self._owned = divide(extents, ranks, max(bucket_bytes // (ranks - 1), 1))
            self._transport = Transport(group, self._owned, names)
        self.held: list[dict[int, list[Segment]]] = [{} for _ in parameters]
        """Of each parameter: which ranks own what."""
        for rank, pieces in enumerate(self._owned):
            for segment in (s for piece in pieces for s in piece):
                if not elementwise:
                    segment = Segment(segment.parameter, 0, parameters[segment.parameter].numel())
                    self.held[segment.parameter][rank] = [segment]
                else:
                    self.held[segment.parameter].setdefault(rank, []).append(segment)
        self.shadows = {
            segment: self._shadow(segment) for held in self.held for segment in held.get(self._rank, ())
        }
        """What the optimizer works on here."""
        self._spreads: dict[tuple[int, torch.dtype], Spread] = {}
        self._addresses = [p.data_ptr() for p in parameters]
        self._reduced: list[tuple[Tensor | None, int]] | None = None
        """The gradients as `reduce` left them, and their versions."""

    def _shadow(self, segment: Segment) -> Tensor:
        parameter = self.parameters[segment.parameter]
        return torch.nn.Parameter(self._memory(segment), requires_grad=parameter.requires_grad)

    def _memory(self, segment: Segment) -> Tensor:
        data = self.parameters[segment.parameter].data
        return data if segment.numel == data.numel() else data.view(-1)[segment.start : segment.stop]

    def shadows_by_group(self) -> dict[int, list[Tensor]]:
        found: dict[int, list[Tensor]] = defaultdict(list)
        for segment, shadow in self.shadows.items():
            found[self.numbers[segment.parameter]].append(shadow)
        return found

    # -- steps --------------------------------------------------------------------------------------------

    def begin(self, options: Mapping[str, str], notes: Notes) -> Census:
        """On all ranks at once, before anything is changed: whether they can step. `options` must be the same on all."""
        return self._census(options, notes)

    def run(self, census: Census, update: Update, error: Exception | None = None) -> None:
        """Reduce, update, publish. A rank that cannot update, or has an error already, takes part all the same, and then all raise."""
        self._follow()
        has_gradient = census.has_gradient
        reduce = self._reduce and self._reduced is None
        self._reduced = None
        live = self._transport.live(has_gradient)
        gather = self._transport.gather([p.data for p in self.parameters], live)
        rounds = self._transport.reduced(self._gradients(), self.parameters, live, reduce=reduce)
        attempt = _Attempt(error)
        if self._piecewise:
            for n, number, gradient in rounds:
                if number is not None and gradient is not None:
                    with attempt:
                        self._run(update, self._with_gradients(number, gradient, has_gradient), attempt)
                gather.publish(n)
        else:
            if self._elementwise:
                given: dict[int, list[Tensor]] = defaultdict(list)
                for _, number, gradient in rounds:
                    if number is not None and gradient is not None:
                        part = self._with_gradients(number, gradient.clone(), has_gradient)
                        for group, shadows in part.items():
                            given[group] += shadows
            else:
                given = self._whole(rounds, has_gradient)
            with attempt:
                self._run(update, given, attempt)
            for n in range(max(map(len, live))):
                gather.publish(n)
        has_any_failed = gather.finish(attempt.error is not None)
        changed = [p for p, has in zip(self.parameters, has_gradient, strict=True) if has]
        if changed:
            increment_version(changed)  # the new values have come past autograd
        if has_any_failed:
            if attempt.error is not None:
                attempt.error.add_note(f"This was rank {self._rank}'s part of a step. {TORN}")
            agree(attempt.error, self._group, STEP, kind=OptimError, help=TORN)

    def _with_gradients(
        self, number: int, gradient: Tensor, has_gradient: Sequence[bool]
    ) -> dict[int, list[Tensor]]:
        """The shadows of a piece, by group, with their gradients."""
        given: dict[int, list[Tensor]] = defaultdict(list)
        at = 0
        for segment in self._owned[self._rank][number]:
            shadow = self.shadows[segment]
            if has_gradient[segment.parameter]:
                part = gradient[at : at + segment.numel].view(shadow.shape)
                shadow.grad = fast.fitting(part, shadow)
                given[self.numbers[segment.parameter]].append(shadow)
            at += segment.numel
        return given

    def _whole(self, rounds: Rounds, has_gradient: Sequence[bool]) -> dict[int, list[Tensor]]:
        """The shadows of whole parameters, by group, with their gradients."""
        given: dict[int, list[Tensor]] = defaultdict(list)
        for segment, shadow in self.shadows.items():
            if has_gradient[segment.parameter]:
                shadow.grad = torch.zeros_like(shadow, memory_format=torch.contiguous_format)
                given[self.numbers[segment.parameter]].append(shadow)
        for _, number, gradient in rounds:
            at = 0
            for s in self._owned[self._rank][number] if number is not None else ():
                whole = self.shadows[Segment(s.parameter, 0, self.parameters[s.parameter].numel())].grad
                if whole is not None and gradient is not None:
                    whole.view(-1)[s.start : s.stop].copy_(gradient[at : at + s.numel])
                at += s.numel
        for shadow in (each for several in given.values() for each in several):
            assert shadow.grad is not None
            shadow.grad = fast.fitting(shadow.grad, shadow)
        return given

    def _run(self, update: Update, given: Mapping[int, list[Tensor]], attempt: _Attempt) -> None:
        try:
            if attempt.error is None and (given or not self._piecewise):  # a class may count its steps
                update(given)
        finally:
            for shadow in (each for several in given.values() for each in several):
                shadow.grad = None

    def _follow(self) -> None:
        """A parameter's `.data` may have been set to something else."""
        for number, parameter in enumerate(self.parameters):
            if parameter.data_ptr() != self._addresses[number]:
                self._addresses[number] = parameter.data_ptr()
                for segment in self.held[number].get(self._rank, ()):
                    self.shadows[segment].data = self._memory(segment)

    # -- gradients ----------------------------------------------------------------------------------------

    def _gradients(self) -> list[Tensor | None]:
        return [None if p.grad is None else fast.fitting(p.grad, p) for p in self.parameters]

    def _census(self, options: Mapping[str, str], notes: Notes, *, clips: bool = False) -> Census:
        """What all ranks have to say. They come to the same, and raise the same."""
        digest = zlib.crc32(repr(options).encode()) & 0xFFFFF
        gradients = [p.grad for p in self.parameters]
        has = [g is not None for g in gradients]
        is_sparse = [g is not None and g.layout is not torch.strided for g in gradients]
        device = self.parameters[0].device
        changed = [_kind(p) != kind for p, kind in zip(self.parameters, self._kinds, strict=True)]
        flags = [notes.error is not None, notes.found_inf, notes.has_hooks]
        said = [*has, *is_sparse, *self._stale(), *changed, *flags, digest, digest * digest]
        counts = torch.tensor(said, dtype=torch.int64, device=device)
        keep(counts)
        with waiting(self._group, "the begin of a step", help="Nothing has been changed here"):
            dist.all_reduce(counts, group=self._group)
            *found, failed, found_inf, has_hooks, total, squares = counts.tolist()
        n = len(has)
        if failed:
            agree(notes.error, self._group, STEP, kind=OptimError, help="Nothing has been changed")
        having, sparse, stale, other = (found[i * n : (i + 1) * n] for i in range(4))
        if any(other):
            named = [name for name, count in zip(self.names, other, strict=True) if count]
            raise OptimError(
                f"{', '.join(map(repr, named))} has another shape, dtype or other strides than when the optimizer was made, on some rank. Make the optimizer after "
                f"such a change. Nothing has been changed"
            )
        if dist.get_world_size(self._group) * squares != total * total:  # their variance is not 0
            check_same(
                self._group,
                "the ranks' options differ",
                options,
                "They must be the same on all: each rank updates its own part with them. A scheduler that follows a metric is to be given the mean of all "
                "ranks'. Nothing has been changed",
            )
        if any(sparse):
            named = [name for name, count in zip(self.names, sparse, strict=True) if count]
            raise OptimError(
                f"the gradient of {', '.join(map(repr, named))} is sparse, and the state of replicated parameters is spread by dense ranges. Make the module "
                f"with sparse=False, or step these parameters by an optimizer of their own. Nothing has been changed"
            )
        ranks = dist.get_world_size(self._group)
        if any(stale):
            self._reduced = None
            if clips and all(count == ranks for count, has in zip(stale, having, strict=True) if has):
                stale = []  # there was no step in between, and all are new
        if any(stale):
            named = [name for name, count in zip(self.names, stale, strict=True) if count]
            raise OptimError(
                f"the gradient of {', '.join(map(repr, named))} has changed since clip_grad_norm_ made it the mean of all ranks': clip after the last backward "
                f"pass, right before step. Nothing has been changed; zero_grad() and a new backward pass go on from here"
            )
        if not self._reduce:
            some = [name for name, count in zip(self.names, having, strict=True) if 0 < count < ranks]
            if some:
                raise OptimError(
                    f"with reduce_gradients=False all ranks have the same gradients, and only some have one for {', '.join(map(repr, some))}. Leave "
                    f"reduce_gradients=True, or wrap the model in DistributedDataParallel. Nothing has been changed"
                )
        return Census(None, bool(found_inf), bool(has_hooks), [count > 0 for count in having])

    def reduce(self, options: Mapping[str, str]) -> list[Tensor]:
        """Have the mean gradients of what this rank owns in `.grad`, before a step that will find them there. Returns those parts."""
        has_gradient = self._census(options, Notes(), clips=True).has_gradient
        for parameter, has in zip(self.parameters, has_gradient, strict=True):
            if has:
                if parameter.grad is None:
                    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
                    gradient = torch.zeros_like(parameter, dtype=dtype)
                else:
                    gradient = fast.laid_out(parameter.grad, parameter)
                if gradient is not parameter.grad:
                    parameter.grad = gradient
        if self._reduce and self._reduced is None:
            live = self._transport.live(has_gradient)
            for _, number, mean in self._transport.reduced(self._gradients(), self.parameters, live):
                if number is not None and mean is not None:
                    self._keep(number, mean, has_gradient)
        self.remember()
        return [self._own_gradient(s) for s in self.shadows if has_gradient[s.parameter]]

    def remember(self) -> None:
        """The gradients are as they shall be for the next step."""
        self._reduced = [(p.grad, -1 if p.grad is None else p.grad._version) for p in self.parameters]

    def forget(self) -> None:
        """New gradients will come."""
        self._reduced = None

    def _stale(self) -> list[bool]:
        """Which gradients have changed since `reduce`. Whether they are means or not nobody knows."""
        if self._reduced is None or not self._reduce:
            return [False] * len(self.parameters)
        return [
            p.grad is not g or (g is not None and g._version != version)
            for p, (g, version) in zip(self.parameters, self._reduced, strict=True)
        ]

    def _keep(self, number: int, mean: Tensor, has_gradient: Sequence[bool]) -> None:
        at = 0
        for s in self._owned[self._rank][number]:
            if has_gradient[s.parameter]:
                own = self._own_gradient(s)
                own.copy_(mean[at : at + s.numel].view(own.shape))
            at += s.numel

    def _own_gradient(self, segment: Segment) -> Tensor:
        gradient = self.parameters[segment.parameter].grad
        assert gradient is not None
        if segment.numel == gradient.numel():
            return gradient.detach()
        return gradient.detach().view(-1)[segment.start : segment.stop]

    # -- state --------------------------------------------------------------------------------------------

    def owner(self, number: int) -> int | None:
        """Of a parameter that has one."""
        ranks = list(self.held[number])
        whole = len(ranks) == 1 and len(self.held[number][ranks[0]]) == 1
        return ranks[0] if whole else None

    def own_shadows(self, number: int) -> list[Tensor]:
        return [self.shadows[s] for s in self.held[number].get(self._rank, ())]

    def spread(self, number: int, dtype: torch.dtype) -> Spread:
        """Of a state that has the parameter's shape."""
        known = self._spreads.get((number, dtype))
        if known is not None:
            return known
        shape = self.parameters[number].shape
        boxes = {
            rank: [box for s in held for box in self._boxes(s)] for rank, held in self.held[number].items()
        }
        self._spreads[number, dtype] = Spread.of(shape, dtype, boxes)
        return self._spreads[number, dtype]

    def shards(self, number: int, tensors: Sequence[Tensor], dtype: torch.dtype) -> Shards:
        """A state that has the parameter's shape, from what each shadow of this rank's has of it."""
        views = []
        for segment, tensor in zip(self.held[number].get(self._rank, ()), tensors, strict=True):
            at = 0
            for box in self._boxes(segment):
                if box.numel == tensor.numel():
                    views.append(tensor.view(box.sizes) if tensor.is_contiguous() else tensor)
                else:
                    views.append(tensor.view(-1)[at : at + box.numel].view(box.sizes))
                at += box.numel
        return Shards(self.spread(number, dtype), views)

    def _boxes(self, segment: Segment) -> list[Box]:
        shape = self.parameters[segment.parameter].shape
        return [Box.whole(shape)] if segment.numel == 0 else flat_boxes(shape, segment.start, segment.stop)


class _Attempt:
    """`with attempt:` keeps the first error, for the time when it can be raised."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, Exception) and self.error is None:
            self.error = error
        return isinstance(error, Exception)


def _kind(parameter: Tensor) -> tuple[torch.Size, torch.dtype, tuple[int, ...]]:
    return parameter.shape, parameter.dtype, parameter.stride()
