"""A model in two stages on two workers, and a batch that goes through them in pieces; saved, and resumed elsewhere.

    python examples/pipeline.py

While the second stage works on one micro-batch, the first is already at the next. Activations go from
stage to stage: the driver holds references only, and sees nothing but losses. Clipping and the optimizer
span both stages.

Half way the driver saves everything with one call; each worker writes what it owns. A second job has one
worker for both stages, loads the checkpoint and goes on. At the end the weights are those of the same
training in one process with whole batches, up to rounding.
"""

import tempfile
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from farstep import autograd, checkpoint, rpc
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


def whole_model():
    return nn.ModuleDict({"first": Stage(*FIRST), "second": LastStage(*SECOND)})


def in_one_process():
    model = whole_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(STEPS):
        x, wanted = batch(step)
        model["second"].loss(model["first"](x), wanted).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def drive(rank, folder, first_worker, second_worker, last_step):
    """The first worker of each job trains up to `last_step`, and saves; the others only answer calls."""
    if rank != 0:
        return
    first = rpc.remote(first_worker, Stage, args=FIRST)
    second = rpc.remote(second_worker, LastStage, args=SECOND)
    parameters = parameter_rrefs(first, "first") + parameter_rrefs(second, "second")
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.2, momentum=0.9)
    state = {"model": {"first": first, "second": second}, "optim": optimizer}
    manager = checkpoint.CheckpointManager(folder)
    resumed = manager.resume(state)  # each worker reads what it owns now; None if there is no checkpoint
    losses = []
    for step in range(0 if resumed is None else resumed + 1, last_step + 1):
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
        if step % 10 == 9:
            tell(f"step {step:2}   loss {losses[-1]:.4f}")
    manager.save(state, last_step)
    return losses


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        names = ["driver", "first", "second"]
        job = (folder, "first", "second", STEPS // 2 - 1)
        losses = run_local(drive, 3, *job, names=names, on_message=lambda _, line: print(line))[0]
        names = ["driver", "worker"]
        job = (folder, "worker", "worker", STEPS - 1)
        losses += run_local(drive, 2, *job, names=names, on_message=lambda _, line: print(line))[0]
        model = whole_model()
        path = checkpoint.CheckpointManager(folder).path(STEPS - 1)
        checkpoint.load({"model": model}, path)  # what both stages have saved, in this one process
    alone = in_one_process().state_dict()
    difference = max((w - alone[name]).abs().max().item() for name, w in model.state_dict().items())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; largest difference to one process {difference:.1e}")
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] / 3
    assert difference < 1e-4
