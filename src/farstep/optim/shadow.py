"""A shadow: a leaf tensor that shares a parameter's memory, and has a `.grad` of its own.

The local optimizer works on shadows, so that the user's `.grad` is neither read nor written. What differs is the version counter,
by which autograd notices that a tensor was changed after a forward pass saved it. A relaxed shadow has its own, so a backward that is
under way meanwhile goes on, with the weights as they are by then. A strict one shares the parameter's: that backward raises.
"""

from __future__ import annotations

import torch

__all__ = ["CONSISTENCIES", "follow", "give_back", "shadow_of"]

CONSISTENCIES = ("relaxed", "strict")


def shadow_of(parameter: torch.Tensor, consistency: str) -> torch.Tensor:
    shared = parameter.detach() if consistency == "strict" else parameter.data
    if isinstance(parameter, torch.nn.Parameter):
        return torch.nn.Parameter(shared, requires_grad=parameter.requires_grad)
    return shared.requires_grad_(parameter.requires_grad)


def follow(shadow: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Share the parameter's memory again, should its `.data` have been set to something else. Whether it had been."""
    if shadow.data_ptr() == parameter.data_ptr() and shadow.is_set_to(parameter):
        return False
    shadow.data = parameter.data
    return True


def give_back(shadow: torch.Tensor, parameter: torch.Tensor) -> None:
    """A class may set the shadow's `.data` instead of writing into it: then the parameter gets it, as if it had been its own."""
    if shadow.data_ptr() != parameter.data_ptr():
        parameter.data = shadow.data
