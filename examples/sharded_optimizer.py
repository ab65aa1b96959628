"""A replicated model whose AdamW state is spread over the ranks (ZeRO-1), saved by three ranks, resumed by two.

    python examples/sharded_optimizer.py

Every rank has the whole model and a share of the data, as with DistributedDataParallel, but only its share
of the optimizer's state: a third of it on three ranks. `ShardedOptimizer` averages the gradients itself.
One call saves the model, the optimizer and the learning-rate schedule, each rank its part, and one call
loads them on another number of ranks. At the end the weights, and the optimizer's state, are those of one
process that trained through with torch's AdamW, up to rounding.

Start your own from `train`. Under torchrun, `dist.init_process_group()` without arguments is enough.
"""

import math
import multiprocessing
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

from farstep import checkpoint
from farstep.optim import ShardedOptimizer

STEPS, SAVE_AT, BATCH, WIDTH = 120, 60, 96, 128


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
    )


def make_schedule(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=STEPS)


def batch(step):
    """The whole batch of a step; each rank takes its share, so any number of ranks sees the same data."""
    x = 2 * torch.rand(BATCH, 2, generator=torch.Generator().manual_seed(step)) - 1
    return x, torch.sin(math.pi * x).prod(1, keepdim=True)


def train(rank, ranks, rendezvous, path, first_step, last_step):
    """On each rank, in the first job and in the one that resumes it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    model = make_model()
    optimizer = ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, lr=0.01, eps=1e-5)
    schedule = make_schedule(optimizer)
    state = {"model": model, "optim": optimizer, "schedule": schedule}
    if first_step > 0:
        checkpoint.load(state, path)  # all ranks call it; each reads its part

    for step in range(first_step, last_step):
        x, wanted = (part.chunk(ranks)[rank] for part in batch(step))
        loss = F.mse_loss(model(x), wanted)
        loss.backward()  # this rank's gradients
        optimizer.clip_grad_norm_(1.0)  # of the mean over all ranks
        optimizer.step()  # with the mean: each rank updates its share, and gets the rest from the others
        optimizer.zero_grad()
        schedule.step()
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"{ranks} ranks   step {step:3}   loss of the first {loss.item():.4f}", flush=True)

    checkpoint.save(state, path)  # all ranks call it; each writes its part
    share = share_of_state(model, optimizer)
    if rank == 0:
        print(f"{ranks} ranks   saved; the first has {share:.1%} of the optimizer's state", flush=True)
    assert share < 1.01 / ranks
    dist.destroy_process_group()


def share_of_state(model, optimizer):
    """How much of the optimizer's state this rank keeps in memory."""
    averages = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]  # all ranks call it
    here = sum(tensor.numel() for average in averages for tensor in average.tensors)
    return here / sum(p.numel() for p in model.parameters())


def run_job(ranks, *arguments):
    mp.start_processes(train, (ranks, *arguments), nprocs=ranks, start_method="forkserver")


def in_one_process():
    torch.set_num_threads(1)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5)
    schedule = make_schedule(optimizer)
    for step in range(STEPS):
        x, wanted = batch(step)
        loss = F.mse_loss(model(x), wanted)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model, optimizer, loss.item()


if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["farstep.optim", "farstep.checkpoint"])
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/checkpoint"
        run_job(3, f"{folder}/first", path, 0, SAVE_AT)
        run_job(2, f"{folder}/second", path, SAVE_AT, STEPS)
        checkpoint.load({"model": model, "optim": optimizer}, path)  # one process, and torch's own class

    alone, optimizer_alone, loss = in_one_process()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    difference = max((mine - theirs).abs().max().item() for mine, theirs in pairs)
    print(f"loss {loss:.4f}; largest difference of weights to one process {difference:.1e}")
    assert difference < 1e-4
    states = optimizer.state_dict()["state"], optimizer_alone.state_dict()["state"]
    torch.testing.assert_close(*states, rtol=0, atol=1e-5)
    assert loss < 0.03  # 0.25 at first
