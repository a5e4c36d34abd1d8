"""Reinforcement learning with actors and a learner: ``python examples/reinforcement_learning.py``

Two actors balance poles on carts. The learner (the driver) broadcasts its weights to them. They act with these weights
for a while, and return their rollouts, from which it learns by proximal policy optimisation (PPO). They make the next
rollouts while the learner still learns from the last ones, so their weights are one round old. PPO corrects for that.
"""

import argparse
import sys
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import farprop
import farprop.rpc as rpc
from farprop.rpc import RRef

ACTORS, CARTS, STEPS, LIMIT = 2, 32, 64, 500  # an episode ends after 500 steps, if the pole stands that long
DISCOUNT, LAMBDA, CLIP, EPOCHS, BATCHES, RATE = 0.99, 0.95, 0.2, 4, 4, 3e-3
Weights = dict[str, Tensor]


def make_model() -> nn.Module:
    """From the state of a cart: logits for a push to the left and to the right, and the value of the state."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


class CartPoles:
    """Many carts at once, each with a pole hinged to it. An action pushes a cart; gravity pulls at its pole."""

    def __init__(self, number: int) -> None:
        self.states = torch.rand(number, 4) / 10 - 0.05  # position, velocity, angle, angular velocity
        self.ages = torch.zeros(number)

    def step(self, actions: Tensor) -> tuple[Tensor, list[float]]:
        """0.02 s with a reward of 1. Returns which episodes have ended, and their returns; new ones begin there."""
        _, velocity, angle, spin = self.states.T
        force, sin, cos = 20.0 * actions - 10.0, angle.sin(), angle.cos()  # newtons, to the right
        push = (force + 0.05 * spin**2 * sin) / 1.1  # the cart has 1 kg, the pole 0.1 kg and a length of 1 m
        turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        change = torch.stack([velocity, push - 0.05 * turn * cos / 1.1, spin, turn], 1)
        self.states = self.states + 0.02 * change
        self.ages += 1
        done = (self.states[:, 0].abs() > 2.4) | (self.states[:, 2].abs() > 0.21) | (self.ages == LIMIT)
        returns = self.ages[done].tolist()
        self.states[done] = torch.rand(len(returns), 4) / 10 - 0.05
        self.ages[done] = 0
        return done, returns


class Actor:
    """Lives on its worker. Its episodes go on from rollout to rollout."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.carts, self.model = CartPoles(CARTS), make_model()

    @torch.no_grad()
    def act(self, weights: Weights) -> tuple[list[Tensor], list[float]]:
        """Make a rollout. Returns its states, actions and so on, step by step, and the returns of ended episodes."""
        self.model.load_state_dict(weights)
        rollout, returns = [], []
        for _ in range(STEPS):
            states = self.carts.states
            found = self.model(states)
            policy = Categorical(logits=found[:, :2])
            actions = policy.sample()
            done, ended = self.carts.step(actions)
            rollout.append((states, actions, policy.log_prob(actions), done.float(), found[:, 2]))
            returns += ended
        *columns, values = (torch.stack(column) for column in zip(*rollout, strict=True))
        return [*columns, torch.cat([values, self.model(self.carts.states)[None, :, 2]])], returns


def act(actors: dict[str, RRef[Actor]], weights: Weights) -> tuple[list[Tensor], list[float]]:
    """What is broadcast: each worker uses its own actor."""
    return actors[rpc.get_worker_info().name].local_value().act(weights)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, rollouts: list[Tensor]) -> None:
    """PPO, on the rollouts of all actors together."""
    states, actions, log_probs, done, values = rollouts
    advantages = torch.zeros_like(values)
    for t in reversed(range(STEPS)):
        following = values[t + 1] + LAMBDA * advantages[t + 1]
        advantages[t] = 1 - values[t] + DISCOUNT * (1 - done[t]) * following
    targets = values + advantages
    columns = [column.flatten(0, 1) for column in (states, actions, log_probs, targets[:-1], advantages[:-1])]
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(columns[0])).chunk(BATCHES):
            state, action, log_prob, target, advantage = (column[batch] for column in columns)
            found = model(state)
            policy = Categorical(logits=found[:, :2])
            ratio = (policy.log_prob(action) - log_prob).exp()
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
            loss = (found[:, 2] - target).pow(2).mean() / 200 - gain - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()


def copy_of(model: nn.Module) -> Weights:
    """The weights as they are now: those of a call that is under way must not change."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def train(rounds: int, workers: list[str]) -> Iterator[float]:
    """Train; yields in each round the mean return of the last 100 episodes."""
    torch.set_num_threads(1)  # the actors need the other cores
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    actors = {name: rpc.remote(name, Actor, args=(seed,)) for seed, name in enumerate(workers, 1)}
    returns: deque[float] = deque(maxlen=100)
    acting = rpc.broadcast(workers, act, args=(actors, copy_of(model)))
    for _ in range(rounds):
        rollouts, ended = zip(*rpc.gather(acting).values(), strict=True)
        acting = rpc.broadcast(workers, act, args=(actors, copy_of(model)))
        learn(model, optimizer, [torch.cat(columns, 1) for columns in zip(*rollouts, strict=True)])
        returns.extend(number for numbers in ended for number in numbers)
        yield sum(returns) / len(returns)
    rpc.gather(acting)


def main(rounds: int) -> None:
    with farprop.workers(ACTORS) as workers:
        for number, mean in enumerate(train(rounds, [worker.name for worker in workers]), 1):
            if number % 2 == 0:
                print(f"round {number:3}  mean return {mean:5.1f}  {'#' * int(mean / 10)}", flush=True)
    print(f"The actors took {rounds * ACTORS * CARTS * STEPS} steps. No episode has a return of more than {LIMIT}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Actors, a learner, and weights that are broadcast.")
    parser.add_argument("--rounds", type=int, default=60)
    try:
        main(parser.parse_args().rounds)
    except KeyboardInterrupt:
        sys.exit(130)
