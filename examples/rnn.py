"""A recurrent network that guesses the next word. Words in and out live on a server, the LSTM on the trainer.

    python examples/rnn.py

The tables that grow with the vocabulary, the embedding and the decoder, are on the server; the trainer keeps the LSTM between them. One
optimizer steps on both. The text is the tale that comes with farstep's demo. After some passes over it the network has it nearly by
heart: the loss falls to less than a third, and the text that it goes on with is made of pieces of the tale.
"""

import re

import torch
import torch.nn.functional as F
from torch import nn

from farstep import autograd, rpc
from farstep.demo.text import Corpus
from farstep.launch import run_local, tell
from farstep.optim import DistributedOptimizer, parameter_rrefs

STEPS, BATCH, LENGTH, WIDTH = 150, 16, 20, 96


class Words:
    """The text as numbers of words; commas and full stops count as words."""

    def __init__(self):
        words = re.findall(r"\w+|[.,?]", Corpus().text)
        self.known = sorted(set(words))
        number = {word: i for i, word in enumerate(self.known)}
        self.data = torch.tensor([number[word] for word in words])

    def batch(self):
        at = torch.randint(len(self.data) - LENGTH, (BATCH, 1)) + torch.arange(LENGTH)
        return self.data[at], self.data[at + 1]


def set_seed(seed):
    torch.manual_seed(seed)


def remote(cls, *args, seed):
    """A module on the server, with its parameters drawn from a seed."""
    rpc.rpc_sync("server", set_seed, args=(seed,))
    return rpc.RemoteModule("server", cls, args)


class Model:
    def __init__(self, size):
        torch.manual_seed(0)
        self.embedding = remote(nn.Embedding, size, WIDTH, seed=1)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.decoder = remote(nn.Linear, WIDTH, size, seed=2)

    def __call__(self, words, memory=None):
        hidden, memory = self.lstm(self.embedding(words), memory)
        return self.decoder(hidden), memory

    def parameters(self):
        return [
            *parameter_rrefs(self.embedding, "embedding"),
            *parameter_rrefs(rpc.RRef(self.lstm), "lstm"),
            *parameter_rrefs(self.decoder, "decoder"),
        ]


def go_on(model, words, start, count):
    numbers, memory = [words.known.index(start)], None
    with torch.no_grad():
        for _ in range(count):
            scores, memory = model(torch.tensor([[numbers[-1]]]), memory)
            numbers.append(scores[0, -1].argmax().item())
    return re.sub(r" ([.,?])", r"\1", " ".join(words.known[number] for number in numbers))


def train(rank):
    if rank != 0:
        return
    words = Words()
    model = Model(len(words.known))
    optimizer = DistributedOptimizer(torch.optim.Adam, model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for step in range(STEPS):
        given, wanted = words.batch()
        with autograd.context() as context_id:
            scores, _ = model(given)
            loss = F.cross_entropy(scores.flatten(0, 1), wanted.flatten())
            autograd.backward(context_id, [loss])
            optimizer.clip_grad_norm_(context_id, 1.0)
            optimizer.step(context_id, close=True)
        schedule.step()
        losses.append(loss.item())
        if step % 25 == 0 or step == STEPS - 1:
            tell(f"step {step:3}   loss {losses[-1]:.3f}")
    return losses, go_on(model, words, "Anna", 30)


if __name__ == "__main__":
    losses, text = run_local(train, 2, names=["trainer", "server"], on_message=lambda _, line: print(line))[0]
    print(text)
    assert losses[-1] < losses[0] / 3
