"""What torch's public API does not offer: running one node of the graph by itself, and the engine without its preparations.

The engine cannot be told to run a node and stop behind it, if it may not also run what is behind: see engine.py. Everything here that
looks inside torch is in this file: that a node can be called, that `_input_metadata` knows the tensors it was made for,
whether the engine is at work on this thread, and where the engine is that `torch.autograd.grad` calls. The last is for speed alone:
before a small graph is run, the checks in Python take longer than the run, and the engine makes them again. Where a torch has no
such place, the public function serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointFunction

from farstep.errors import AutogradError

__all__ = ["input_count", "run_engine", "run_node"]

Gradients = list[torch.Tensor | None]
NO_TASK = -1
_engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
_current_task: Any = getattr(torch._C, "_current_graph_task_id", lambda: NO_TASK)


def run_engine(
    starts: tuple[GradientEdge, ...],
    gradients: tuple[torch.Tensor, ...],
    places: tuple[GradientEdge, ...],
    *,
    retain_graph: bool,
    create_graph: bool,
) -> Sequence[torch.Tensor | None]:
    """`torch.autograd.grad(starts, places, gradients, allow_unused=True)`."""
    if _engine is None:
        return torch.autograd.grad(
            starts,
            places,
            gradients,
            retain_graph=retain_graph,
            create_graph=create_graph,
            allow_unused=True,
        )
    results: Sequence[torch.Tensor | None] = _engine.run_backward(
        starts, gradients, retain_graph, create_graph, places, True, accumulate_grad=False
    )
    return results


def input_count(node: Any) -> int:
    """How many gradients a node is given: one for each tensor that its function returned."""
    return len(node._input_metadata)


def run_node(node: Any, gradients: Sequence[torch.Tensor | None]) -> Gradients:
    """The gradients that flow over a node's `next_functions`. The node's hooks are not run."""
    if _current_task() == NO_TASK:
        return _run_node(node, gradients)
    # In a hook of another backward pass: a node called here would compute what that pass needs of it.
    with ThreadPoolExecutor(
        1, initializer=torch.set_grad_enabled, initargs=(torch.is_grad_enabled(),)
    ) as elsewhere:
        return elsewhere.submit(_run_node, node, gradients).result()


def _run_node(node: Any, gradients: Sequence[torch.Tensor | None]) -> Gradients:
    if isinstance(node, BackwardCFunction):
        flowing = _run_python(node, gradients)
    else:
        flowing = _as_list(node(*gradients))
    return [
        _fit(gradient, below, number)
        for gradient, (below, number) in zip(flowing, node.next_functions, strict=True)
    ]


def _run_python(node: Any, gradients: Sequence[torch.Tensor | None]) -> Gradients:
    """A user's autograd.Function: it gives one gradient for each argument of its forward, tensor or not."""
    function = type(node)._forward_cls
    if function is CheckpointFunction:
        raise AutogradError(
            "torch.utils.checkpoint(use_reentrant=True) puts gradients into .grad, and a context has its own: use use_reentrant=False"
        )
    if not _takes_none(function):
        gradients = [
            _zeros(node._input_metadata[i]) if gradient is None else gradient
            for i, gradient in enumerate(gradients)
        ]
    results = _as_list(node.apply(*gradients))
    results += [None] * (len(node.needs_input_grad) - len(results))
    wanted = iter(r for r, is_wanted in zip(results, node.needs_input_grad, strict=False) if is_wanted)
    return [None if below is None else next(wanted) for below, _ in node.next_functions]


def _takes_none(function: Any) -> bool:
    """Whether its `backward` is to be given None for outputs without a gradient. Torch keeps that to itself; but who asks for it names it."""
    return any(
        "set_materialize_grads" in getattr(getattr(part, "__code__", None), "co_names", ())
        for part in (function.forward, function.setup_context)
    )


def _zeros(metadata: Any) -> torch.Tensor:
    return torch.zeros(tuple(metadata.shape), dtype=metadata.dtype, device=metadata.device)


def _fit(gradient: torch.Tensor | None, below: Any, number: int) -> torch.Tensor | None:
    """As the engine does: a gradient of a broadcast tensor is summed, and has the tensor's dtype."""
    if gradient is None or below is None:
        return None
    wanted = below._input_metadata[number]
    if gradient.layout is torch.strided and gradient.shape != torch.Size(wanted.shape):
        gradient = gradient.sum_to_size(tuple(wanted.shape))
    return gradient if gradient.dtype == wanted.dtype else gradient.to(wanted.dtype)


def _as_list(results: Any) -> Gradients:
    return list(results) if isinstance(results, tuple | list) else [results]
