"""A small recommender in two processes: the embeddings on a parameter server, the layers on a trainer.

    python examples/remote_embedding.py

The ratings are made up: every user and every film has a hidden taste, and a rating is how well the two agree. The trainer never
sees the table of embeddings. It asks the server for some rows, their gradients find their own way back, and the optimizer
steps on the server, where only those rows are touched. The loss falls to less than half.
"""

import torch
from torch import nn

from farstep import autograd, rpc
from farstep.launch import run_local, tell
from farstep.optim import DistributedOptimizer, parameter_rrefs

USERS, FILMS, SIZE = 200, 300, 16
STEPS, BATCH = 200, 512


class Table(nn.Module):
    """On the server: one embedding for each user and each film."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.rows = nn.Embedding(USERS + FILMS, SIZE, sparse=True)

    def forward(self, users, films):
        return self.rows(users), self.rows(films + USERS)


class Ratings:
    """Batches of (user, film, rating)."""

    def __init__(self):
        self.random = torch.Generator().manual_seed(2)
        self.taste_of_users = torch.randn(USERS, 3, generator=self.random)
        self.taste_of_films = torch.randn(FILMS, 3, generator=self.random)

    def batch(self):
        users = torch.randint(USERS, (BATCH,), generator=self.random)
        films = torch.randint(FILMS, (BATCH,), generator=self.random)
        agreement = (self.taste_of_users[users] * self.taste_of_films[films]).sum(1)
        return users, films, torch.sigmoid(agreement)


def train():
    """On the trainer. Returns the mean loss of the first ten steps and of the last ten."""
    torch.manual_seed(3)
    table = rpc.RemoteModule("server", Table)
    layers = nn.Sequential(nn.Linear(3 * SIZE, 64), nn.ReLU(), nn.Linear(64, 1), nn.Sigmoid())
    optimizers = [
        DistributedOptimizer(torch.optim.SparseAdam, parameter_rrefs(table), lr=0.05),
        DistributedOptimizer(torch.optim.Adam, parameter_rrefs(rpc.RRef(layers)), lr=0.005),
    ]
    ratings = Ratings()
    losses = []
    for step in range(STEPS):
        users, films, rating = ratings.batch()
        with autograd.context() as context_id:
            user, film = table(users, films)
            guess = layers(torch.cat([user, film, user * film], dim=1)).squeeze(1)
            loss = nn.functional.mse_loss(guess, rating)
            autograd.backward(context_id, [loss])  # gradients gather in the context, here and on the server
            for optimizer in optimizers:
                optimizer.step(context_id)  # ... and are applied where they are
        losses.append(loss.item())
        if step % 25 == 0 or step == STEPS - 1:
            tell(f"step {step:3}   loss {losses[-1]:.4f}")
    return sum(losses[:10]) / 10, sum(losses[-10:]) / 10


def work(rank):
    if rank == 0:
        return train()
    # The server only answers calls: run_local keeps it until the trainer has returned.


if __name__ == "__main__":
    first, last = run_local(work, 2, names=["trainer", "server"], on_message=lambda _, line: print(line))[0]
    print(f"mean loss of ten steps: {first:.4f} at first, {last:.4f} at the end")
    assert last < first / 2
