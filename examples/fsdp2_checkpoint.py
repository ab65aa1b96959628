"""An FSDP2 training on three ranks that is killed, and resumes on two from its last checkpoint.

    python examples/fsdp2_checkpoint.py

A small transformer learns to reverse strings. A `CheckpointManager` saves the model, the optimizer and
the learning-rate schedule in the background, and keeps the last two checkpoints. The first job is killed
as a preempted one would be: no rank can clean up. The second job has one rank less, and goes on from the
newest checkpoint that is whole. At the end its weights are those of one process that trained through, up
to rounding.

Start your own from `train`. Under torchrun, `dist.init_process_group()` without arguments is enough.
"""

import multiprocessing
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from farstep import checkpoint

STEPS, SAVE_EVERY, KILL_AFTER = 80, 10, 19
BATCH, LENGTH, LETTERS, WIDTH = 96, 6, 10, 32


class Reverser(nn.Module):
    """Gives the logarithms of probabilities: which letter the reversed string has at each place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, text):
        x = self.letters(text) + self.places(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return F.log_softmax(self.head(x), dim=2)


def batch(step):
    """The whole batch of a step; each rank takes its share, so any number of ranks sees the same data."""
    return torch.randint(LETTERS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def make_optimizer(model):
    # A large eps keeps rounding small: Adam divides tiny gradients by their own size.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5, fused=True)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=STEPS)


def train_step(model, optimizer, schedule, text):
    loss = F.nll_loss(model(text).transpose(1, 2), text.flip(1))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    return loss.item()


def train(rank, ranks, rendezvous, folder):
    """On each rank, in the first job and in any job that resumes it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    model = Reverser()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer, schedule = make_optimizer(model)
    state = {"model": model, "optim": optimizer, "schedule": schedule}

    manager = checkpoint.CheckpointManager(folder, keep_last=2)
    resumed = manager.resume(state)  # fills the state; None if there is no checkpoint yet
    first_step = 0 if resumed is None else resumed + 1
    saving = None
    for step in range(first_step, STEPS):
        loss = train_step(model, optimizer, schedule, batch(step).chunk(ranks)[rank])
        if (step + 1) % SAVE_EVERY == 0:
            saving = manager.async_save(state, step)  # training goes on while it is written
            if rank == 0:
                print(f"{ranks} ranks   step {step}   loss of the first {loss:.4f}", flush=True)
    if saving is not None:
        saving.wait()  # the last checkpoint is whole before the job ends
    dist.destroy_process_group()


def start_job(ranks, rendezvous, folder, *, join):
    arguments = (ranks, rendezvous, folder)
    return mp.start_processes(train, arguments, nprocs=ranks, join=join, start_method="forkserver")


def in_one_process():
    torch.set_num_threads(1)
    model = Reverser()
    optimizer, schedule = make_optimizer(model)
    for step in range(STEPS):
        train_step(model, optimizer, schedule, batch(step))
    return model


if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["torch.distributed.fsdp", "farstep.checkpoint"])
    with tempfile.TemporaryDirectory() as folder:
        manager = checkpoint.CheckpointManager(f"{folder}/run")
        job = start_job(3, f"{folder}/first", f"{folder}/run", join=False)
        while (manager.newest() or 0) < KILL_AFTER and not job.join(timeout=0.05):
            pass
        for process in job.processes:
            process.kill()
        for process in job.processes:
            process.join()
        killed_at = manager.newest()
        print(f"all ranks are killed; the newest checkpoint is that of step {killed_at}")
        start_job(2, f"{folder}/second", f"{folder}/run", join=True)
        last = manager.newest()
        weights = checkpoint.read(manager.path(last))["model"]  # whole tensors, in this one process

    model = Reverser()
    model.load_state_dict(weights)
    new = batch(STEPS)
    right = (model(new).argmax(2) == new.flip(1)).float().mean().item()
    alone = in_one_process().state_dict()
    difference = max((weights[name] - alone[name]).abs().max().item() for name in alone)
    print(f"{right:.1%} of new letters are right; largest difference to one process {difference:.1e}")
    assert KILL_AFTER <= killed_at <= last == STEPS - 1
    assert right > 0.95
    assert difference < 1e-4
