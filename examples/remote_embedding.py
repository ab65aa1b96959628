"""A small recommender in two processes: the embeddings on a parameter server, the layers on a trainer.

    python examples/remote_embedding.py

The ratings are made up: every user and every film has a hidden taste, and a rating is how well the two agree. The trainer never
sees the table of embeddings. It asks the server for some rows, and their gradients find their own way back.
"""

import torch
from torch import nn

from farstep import autograd, rpc
from farstep.launch import run_local, tell

USERS, FILMS, SIZE = 200, 300, 16
STEPS, BATCH = 200, 512


class Table:
    """On the server: one embedding for each user and each film, and the optimizer for them."""

    def __init__(self):
        torch.manual_seed(1)
        self.rows = nn.Embedding(USERS + FILMS, SIZE, sparse=True)
        self.optimizer = torch.optim.SparseAdam(self.rows.parameters(), lr=0.05)

    def look_up(self, users, films):
        return self.rows(users), self.rows(films + USERS)

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


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
    table = rpc.remote("server", Table)
    layers = nn.Sequential(nn.Linear(3 * SIZE, 64), nn.ReLU(), nn.Linear(64, 1), nn.Sigmoid())
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.005)
    ratings = Ratings()
    losses = []
    for step in range(STEPS):
        users, films, rating = ratings.batch()
        with autograd.context() as context_id:
            user, film = table.rpc_sync().look_up(users, films)
            guess = layers(torch.cat([user, film, user * film], dim=1)).squeeze(1)
            loss = nn.functional.mse_loss(guess, rating)
            autograd.backward(context_id, [loss])  # gradients gather in the context, here and on the server
            autograd.populate_grad(context_id)  # ... and now they are in .grad, here and on the server
        optimizer.step()
        optimizer.zero_grad()
        table.rpc_sync().step()
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
