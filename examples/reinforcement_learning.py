"""Reinforcement learning with actors and a learner: ``python examples/reinforcement_learning.py``

Two actors balance poles on carts. The learner (the driver) broadcasts its weights to them. They play a round with
these, and send back what they have seen, from which it learns by proximal policy optimisation (PPO). They play the next
round while the learner still learns from the last one, so their weights are one round old. PPO corrects for that.
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

ACTORS, CARTS, MOMENTS, LIMIT = 2, 32, 64, 500  # a game ends after 500 moments, if the pole stands that long
DISCOUNT, SMOOTHING, CLIP, EPOCHS, BATCHES, RATE = 0.99, 0.95, 0.2, 4, 4, 3e-3
Weights = dict[str, Tensor]


def make_model() -> nn.Module:
    """From the state of a cart: scores for a push to the left and to the right, and the value of the state."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


class Carts:
    """Carts on a track, each with a pole hinged to it. A push accelerates a cart; gravity pulls at its pole."""

    def __init__(self, number: int) -> None:
        self.state = torch.rand(number, 4) / 10 - 0.05  # position, speed, angle, angular speed
        self.age = torch.zeros(number)

    def step(self, push_right: Tensor) -> tuple[Tensor, list[float]]:
        """Push each cart for 0.02 s; returns which games are over, and how long they were. New ones begin there."""
        _, speed, angle, spin = self.state.T
        force, sin, cos = 20.0 * push_right - 10.0, angle.sin(), angle.cos()  # newtons
        thrust = (force + 0.05 * spin**2 * sin) / 1.1  # the cart has 1 kg, the pole 0.1 kg and a length of 1 m
        turn = (9.8 * sin - cos * thrust) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        change = torch.stack([speed, thrust - 0.05 * turn * cos / 1.1, spin, turn], 1)
        self.state = self.state + 0.02 * change
        self.age += 1
        over = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.21) | (self.age == LIMIT)
        lengths = self.age[over].tolist()
        self.state[over] = torch.rand(len(lengths), 4) / 10 - 0.05
        self.age[over] = 0
        return over, lengths


class Actor:
    """Lives on its worker, with carts whose games go on from round to round."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.carts, self.model = Carts(CARTS), make_model()

    @torch.no_grad()
    def play(self, weights: Weights) -> tuple[list[Tensor], list[float]]:
        """Play a round; returns what was seen, moment by moment, and the lengths of games that ended."""
        self.model.load_state_dict(weights)
        moments, lengths = [], []
        for _ in range(MOMENTS):
            state = self.carts.state
            found = self.model(state)
            choice = Categorical(logits=found[:, :2])
            push = choice.sample()
            over, ended = self.carts.step(push)
            moments.append((state, push, choice.log_prob(push), over.float(), found[:, 2]))
            lengths += ended
        *seen, values = (torch.stack(column) for column in zip(*moments, strict=True))
        return [*seen, torch.cat([values, self.model(self.carts.state)[None, :, 2]])], lengths


def play(actors: dict[str, RRef[Actor]], weights: Weights) -> tuple[list[Tensor], list[float]]:
    """What is broadcast: each worker plays with its own actor."""
    return actors[rpc.get_worker_info().name].local_value().play(weights)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, seen: list[Tensor]) -> None:
    """Improve the weights with the rounds of all actors."""
    states, pushes, log_chances, over, values = seen
    gains = torch.zeros_like(values)
    for t in reversed(range(MOMENTS)):  # each moment has a reward of 1
        gains[t] = 1 - values[t] + DISCOUNT * (1 - over[t]) * (values[t + 1] + SMOOTHING * gains[t + 1])
    columns = [part.flatten(0, 1) for part in (states, pushes, log_chances, (gains + values)[:-1], gains[:-1])]
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(columns[0])).chunk(BATCHES):
            state, push, log_chance, worth, gain = (column[batch] for column in columns)
            found = model(state)
            choice = Categorical(logits=found[:, :2])
            ratio = (choice.log_prob(push) - log_chance).exp()
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            policy = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
            loss = (found[:, 2] - worth).pow(2).mean() / 200 - policy - 0.01 * choice.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()


def train(rounds: int, workers: list[str]) -> Iterator[float]:
    """Train; yields after each round how long the last 100 games were."""
    torch.set_num_threads(1)  # the actors need the other cores
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    actors = {name: rpc.remote(name, Actor, args=(seed,)) for seed, name in enumerate(workers, 1)}
    lengths: deque[float] = deque(maxlen=100)
    playing = {}
    for _ in range(rounds):
        playing = playing or rpc.broadcast(workers, play, args=(actors, copy_of(model)))
        seen, ended = zip(*rpc.gather(playing).values(), strict=True)
        playing = rpc.broadcast(workers, play, args=(actors, copy_of(model)))
        learn(model, optimizer, [torch.cat(parts, 1) for parts in zip(*seen, strict=True)])
        lengths.extend(length for some in ended for length in some)
        yield sum(lengths) / len(lengths)
    rpc.gather(playing)


def copy_of(model: nn.Module) -> Weights:
    """A copy of the weights: what is under way must not change."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def main(rounds: int) -> None:
    with farprop.workers(ACTORS) as workers:
        for number, length in enumerate(train(rounds, [worker.name for worker in workers]), 1):
            if number % 2 == 0:
                print(f"round {number:3}  games last {length:5.1f} moments {'#' * int(length / 10)}", flush=True)
    print(f"{rounds * ACTORS * CARTS * MOMENTS} moments were played.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Actors, a learner, and weights that are broadcast.")
    parser.add_argument("--rounds", type=int, default=60)
    try:
        main(parser.parse_args().rounds)
    except KeyboardInterrupt:
        sys.exit(130)
