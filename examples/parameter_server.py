"""A parameter server and two trainers that step whenever they are ready.

    python examples/parameter_server.py

The server keeps the weights and does no arithmetic but the optimizer's. A trainer fetches them, computes with its own half of the data,
and sends back gradients, without waiting for the other: weights may change between a trainer's fetch and its step, and
training goes on all the same. The task is to tell two spirals apart; at the end more than 95 % of new points are right.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from farstep import autograd, rpc
from farstep.launch import run_local, tell
from farstep.optim import DistributedOptimizer, parameter_rrefs

STEPS, BATCH = 200, 128
TRAINERS = ["trainer1", "trainer2"]


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


class Server:
    """Holds the one set of weights."""

    def __init__(self):
        self.net = make_net()

    def module(self):
        return rpc.RRef(self.net)

    def weights(self):
        return dict(
            self.net.named_parameters()
        )  # gradients of these come back, since the caller is in a context


def spirals(seed, count):
    """Points on two spirals, and which of the two each is on."""
    random = torch.Generator().manual_seed(seed)
    label = torch.randint(2, (count,), generator=random)
    along = torch.rand(count, generator=random)
    angle = 2 * math.pi * along + math.pi * label
    points = torch.stack([angle.cos(), angle.sin()], dim=1) * (0.2 + along)[:, None]
    return points + 0.02 * torch.randn(count, 2, generator=random), label


def train(server, seed):
    """On a trainer: its own data, its own optimizer, the server's weights. Returns its number of steps."""
    net = make_net()  # for its shape only: the weights are fetched
    module = server.rpc_sync().module()
    optimizer = DistributedOptimizer(torch.optim.Adam, parameter_rrefs(module), lr=0.01)
    points, label = spirals(seed, 2000)
    for step in range(STEPS):
        at = torch.randint(len(points), (BATCH,))
        with autograd.context() as context_id:
            weights = server.rpc_sync().weights()
            loss = F.cross_entropy(functional_call(net, weights, (points[at],)), label[at])
            autograd.backward(context_id, [loss])
            optimizer.step(context_id, close=True)
        if step % 50 == 0 or step == STEPS - 1:
            tell(f"step {step:3}   loss {loss.item():.3f}")
    return step + 1


def run(rank):
    if rank != 0:
        return
    server = rpc.RRef(Server())  # on this worker, which is the server
    trainings = [rpc.rpc_async(name, train, args=(server, seed)) for seed, name in enumerate(TRAINERS)]
    steps = [training.wait() for training in trainings]
    points, label = spirals(99, 1000)
    with torch.no_grad():
        right = (server.local_value().net(points).argmax(1) == label).float().mean().item()
    return steps, right


if __name__ == "__main__":
    names = ["server", *TRAINERS]
    steps, right = run_local(run, 3, names=names, on_message=lambda name, line: print(f"{name}  {line}"))[0]
    print(f"{' + '.join(map(str, steps))} steps; {right:.1%} of new points are right")
    assert steps == [STEPS, STEPS]
    assert right > 0.95
