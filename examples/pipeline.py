"""A model in two stages on two workers, and a batch that goes through them in pieces.

    python examples/pipeline.py

While the second stage works on one micro-batch, the first is already at the next. Activations go from stage to stage: the driver
holds references only, and sees nothing but losses. Clipping and the optimizer span both stages. At the end the weights are
those of the same training in one process with whole batches, up to rounding.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from farstep import autograd, rpc
from farstep.launch import run_local, tell
from farstep.optim import DistributedOptimizer, parameter_rrefs

STEPS, BATCH, PIECES, WIDTH = 80, 256, 4, 64


class Stage(nn.Module):
    """Some layers, for a tensor that may still be on its way, or on another worker."""

    def __init__(self, seed, *sizes):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes)))

    def forward(self, x):
        return self.layers(x.to_here() if isinstance(x, rpc.RRef) else x)


class LastStage(Stage):
    def loss(self, x, wanted):
        return F.mse_loss(self(x), wanted)


FIRST = (1, 8, WIDTH, WIDTH)
SECOND = (2, WIDTH, WIDTH, 1)


def batch(step):
    """The same for everyone who asks for the same step."""
    random = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 8, generator=random)
    return x, torch.sin(x[:, :2].sum(1, keepdim=True))


def in_one_process():
    model = nn.ModuleDict({"first": Stage(*FIRST), "second": LastStage(*SECOND)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(STEPS):
        x, wanted = batch(step)
        model["second"].loss(model["first"](x), wanted).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def drive(rank):
    if rank != 0:
        return
    first = rpc.remote("first", Stage, args=FIRST)
    second = rpc.remote("second", LastStage, args=SECOND)
    parameters = parameter_rrefs(first, "first") + parameter_rrefs(second, "second")
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.2, momentum=0.9)
    losses = []
    for step in range(STEPS):
        x, wanted = batch(step)
        with autograd.context() as context_id:
            futures = []
            for piece, goal in zip(x.chunk(PIECES), wanted.chunk(PIECES), strict=True):
                hidden = first.remote().forward(piece)  # returns at once
                futures.append(second.rpc_async().loss(hidden, goal))
            loss = torch.stack(torch.futures.wait_all(futures)).mean()
            autograd.backward(context_id, [loss])
            optimizer.clip_grad_norm_(context_id, 1.0)
            optimizer.step(context_id, close=True)
        losses.append(loss.item())
        if step % 10 == 0 or step == STEPS - 1:
            tell(f"step {step:2}   loss {losses[-1]:.4f}")
    alone = in_one_process()
    difference = max((rref.to_here() - alone[name]).abs().max().item() for name, rref in parameters)
    return losses, difference


if __name__ == "__main__":
    names = ["driver", "first", "second"]
    losses, difference = run_local(drive, 3, names=names, on_message=lambda _, line: print(line))[0]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; largest difference to one process {difference:.1e}")
    assert losses[-1] < losses[0] / 3
    assert difference < 1e-4
