"""An agent with the policy, and observers that ask it for an action at every step of their worlds (REINFORCE)."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import nn

from bench.clients.programs import job
from bench.world import World

OBSERVERS = 3


class Observer:
    def __init__(self, number: int) -> None:
        self._number = number
        self._world = World(number)

    def run_episode(self, agent: Any, steps: int) -> None:
        state = self._world.reset()
        for _ in range(steps):
            action = agent.rpc_sync().select_action(self._number, state)
            state, reward = self._world.step(action)
            agent.rpc_sync().take_reward(self._number, reward)


class Agent:
    def __init__(self) -> None:
        torch.manual_seed(3)
        self._policy = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))
        self._optimizer = torch.optim.Adam(self._policy.parameters(), lr=0.01)
        self._lock = threading.Lock()
        # Each observer has its own random generator, so that the order of requests does not matter.
        self._dice = [torch.Generator().manual_seed(100 + number) for number in range(OBSERVERS)]
        self._observers = [rpc.remote(f"observer{number}", Observer, args=(number,)) for number in range(OBSERVERS)]
        self._forget()

    def _forget(self) -> None:
        self._log_probabilities: list[list[torch.Tensor]] = [[] for _ in range(OBSERVERS)]
        self._rewards: list[list[float]] = [[] for _ in range(OBSERVERS)]

    def select_action(self, observer: int, state: torch.Tensor) -> int:
        with self._lock:
            logs = self._policy(state).log_softmax(0)
            action = int(torch.multinomial(logs.detach().exp(), 1, generator=self._dice[observer]))
            self._log_probabilities[observer].append(logs[action])
            return action

    def take_reward(self, observer: int, reward: float) -> None:
        self._rewards[observer].append(reward)

    def run_episode(self, own: Any, steps: int) -> float:
        futures = [observer.rpc_async(timeout=0).run_episode(own, steps) for observer in self._observers]
        torch.futures.wait_all(futures)
        terms = []
        for logs, rewards in zip(self._log_probabilities, self._rewards, strict=True):
            to_come, returns = 0.0, []
            for reward in reversed(rewards):
                to_come = reward + 0.95 * to_come
                returns.append(to_come)
            value = torch.tensor(returns[::-1])
            terms.append(-(torch.stack(logs) * (value - value.mean())).sum())
        self._optimizer.zero_grad()
        torch.stack(terms).sum().backward()
        self._optimizer.step()
        total = sum(map(sum, self._rewards))
        self._forget()
        return total

    def norms(self) -> list[float]:
        return [parameter.norm().item() for parameter in self._policy.parameters()]


def run_worker(rank: int, episodes: int, steps: int) -> tuple[float, Any] | None:
    if rank:
        return None
    agent = Agent()
    own = rpc.RRef(agent)
    clock = job.Clock()
    rewards = [agent.run_episode(own, steps) for _ in range(episodes)]
    return clock.read(), {"rewards": rewards, "norms": agent.norms()}


if __name__ == "__main__":
    episodes, steps = (2, 5) if job.tiny() else (20, 100)
    job.run(run_worker, ["agent", *(f"observer{number}" for number in range(OBSERVERS))], episodes, steps)
