"""Reinforcement learning with three actors and a learner: balancing a pole on a cart.

    python examples/actor_learner.py

The learner keeps the policy. In each round the actors fetch its weights, play a number of games at once, and compute the loss of what
they saw (REINFORCE). The learner adds the losses up and calls backward once: each actor computes the gradients of its own
games, and they meet at the learner's weights. A game lasts at most 200 moves; a random policy drops the pole after about 20.
At the end the mean is above 150.
"""

import math

import torch
from torch import nn
from torch.distributions import Categorical
from torch.func import functional_call

from farstep import autograd, rpc
from farstep.launch import run_local, tell
from farstep.optim import DistributedOptimizer, parameter_rrefs

ACTORS = ["actor1", "actor2", "actor3"]
ROUNDS, GAMES, MOVES = 20, 16, 200


class Policy(nn.Module):
    """Chances of pushing left or right."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh())
        self.push = nn.Linear(64, 2)

    def forward(self, state):
        return Categorical(logits=self.push(self.body(state)))


def move(state, push):
    """A fiftieth of a second of many carts at once: their place and speed, their pole's angle and its speed."""
    _, speed, angle, turning = state.unbind(1)
    force = 20.0 * push - 10.0
    cart, pole, half = 1.0, 0.1, 0.5
    swing = (force + pole * half * turning**2 * angle.sin()) / (cart + pole)
    turn = (9.8 * angle.sin() - angle.cos() * swing) / (
        half * (4 / 3 - pole * angle.cos() ** 2 / (cart + pole))
    )
    push_on = swing - pole * half * turn * angle.cos() / (cart + pole)
    return state + 0.02 * torch.stack([speed, push_on, turning, turn], dim=1)


def is_over(state):
    return (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 12 * math.pi / 180)


def play(policy):
    """Play all games to their end. Returns states, pushes and which of the moves counted, each by move and game."""
    state = torch.rand(GAMES, 4) * 0.1 - 0.05
    running = torch.ones(GAMES, dtype=torch.bool)
    seen = []
    with torch.no_grad():
        while running.any() and len(seen) < MOVES:
            push = policy(state).sample()
            seen.append((state, push, running))
            state = move(state, push)
            running = running & ~is_over(state)
    return [torch.stack(each) for each in zip(*seen, strict=True)]


def act(learner_weights, seed):
    """On an actor: the loss of some games, and how long they were. The weights have a way back to the learner."""
    torch.manual_seed(seed)
    shape = Policy()

    def policy(state):
        return functional_call(shape, learner_weights, (state,))

    states, pushes, counted = play(policy)
    left = counted.float().flip(0).cumsum(0).flip(0)  # moves until the end: the reward from here on
    reward = (left - left[counted].mean()) / (left[counted].std() + 1e-6)
    chances = policy(states).log_prob(pushes)
    return -(chances * reward)[counted].mean(), counted.sum(0).float().mean()


def learn(rank):
    if rank != 0:
        return
    torch.manual_seed(0)
    policy = Policy()
    optimizer = DistributedOptimizer(torch.optim.Adam, parameter_rrefs(rpc.RRef(policy)), lr=0.02)
    lengths = []
    for number in range(ROUNDS):
        with autograd.context() as context_id:
            weights = dict(policy.named_parameters())
            games = [
                rpc.rpc_async(actor, act, args=(weights, number * len(ACTORS) + i))
                for i, actor in enumerate(ACTORS)
            ]
            losses, moves = zip(*torch.futures.wait_all(games), strict=True)
            autograd.backward(context_id, [torch.stack(losses).mean()])
            optimizer.step(context_id, close=True)
        lengths.append(torch.stack(moves).mean().item())
        if number % 5 == 0 or number == ROUNDS - 1:
            tell(f"round {number:2}   {lengths[-1]:5.1f} moves a game")
    return lengths


if __name__ == "__main__":
    lengths = run_local(learn, 4, names=["learner", *ACTORS], on_message=lambda _, line: print(line))[0]
    last = sum(lengths[-5:]) / 5
    print(f"{lengths[0]:.0f} moves a game at first, {last:.0f} at the end")
    assert last > 150
