"""Gradients that are too large: their norms, and what makes them smaller. The owner's side of clip_grad_norm_ and clip_grad_value_."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["clamping", "norms", "scaling"]

Change = Callable[[torch.Tensor, bool], torch.Tensor]
"""See `Gradients.change`."""


def norms(gradients: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of each gradient. All of them go to the caller, so that any norm type gives what it gives in one process."""
    if not gradients:
        return torch.zeros(0)
    with torch.no_grad():
        found = [torch.linalg.vector_norm(_values(g), norm_type) for g in gradients]
        return torch.stack(
            [getattr(n, "full_tensor", lambda n=n: n)().cpu() for n in found]
        )  # of DTensors, too


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """The entries of a sparse gradient, those of one place added up."""
    return gradient if gradient.layout is torch.strided else gradient.detach().coalesce().values()


def scaling(coefficient: torch.Tensor) -> Change:
    def scale(gradient: torch.Tensor, mine: bool) -> torch.Tensor:
        factor = coefficient.to(gradient.device)
        return gradient.mul_(factor) if mine and not gradient.requires_grad else gradient.detach() * factor

    return scale


def clamping(clip_value: float) -> Change:
    def clamp(gradient: torch.Tensor, mine: bool) -> torch.Tensor:
        if gradient.layout is not torch.strided:
            gradient = gradient.detach().coalesce()
            values = gradient.values().clamp(-clip_value, clip_value)
            return torch.sparse_coo_tensor(
                gradient.indices(), values, gradient.shape, is_coalesced=True, check_invariants=False
            )
        if mine and not gradient.requires_grad:
            return gradient.clamp_(-clip_value, clip_value)
        return gradient.detach().clamp(-clip_value, clip_value)

    return clamp
