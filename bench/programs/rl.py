"""REINFORCE: an agent with the policy, and two observers that call it for each of 40 actions and report the rewards."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from bench.cases import Api
from bench.programs import Step
from bench.side import side
from bench.world import World

OBSERVERS, ACTIONS = 2, 40


class Observer:
    def __init__(self, number: int) -> None:
        self._number = number
        self._world = World(number)

    def run_episode(self, agent: Any) -> None:
        state = self._world.reset()
        for _ in range(ACTIONS):
            action = side.rpc.rpc_sync(agent.owner(), select_action, args=(agent, self._number, state))
            state, reward = self._world.step(action)
            side.rpc.rpc_sync(agent.owner(), report_reward, args=(agent, self._number, reward))


class Agent:
    def __init__(self) -> None:
        torch.manual_seed(3)
        self._policy = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))
        self._optimizer = torch.optim.Adam(self._policy.parameters(), lr=0.01)
        self._lock = threading.Lock()
        # Each observer has its own random generator, so that the order of requests does not matter.
        self._dice = [torch.Generator().manual_seed(100 + number) for number in range(OBSERVERS)]
        self._forget()

    def _forget(self) -> None:
        self._logs: list[list[torch.Tensor]] = [[] for _ in range(OBSERVERS)]
        self._rewards: list[list[float]] = [[] for _ in range(OBSERVERS)]

    def select_action(self, observer: int, state: torch.Tensor) -> int:
        with self._lock:
            logs = self._policy(state).log_softmax(0)
            action = int(torch.multinomial(logs.detach().exp(), 1, generator=self._dice[observer]))
            self._logs[observer].append(logs[action])
            return action

    def report_reward(self, observer: int, reward: float) -> None:
        self._rewards[observer].append(reward)

    def finish_episode(self) -> float:
        terms = []
        for logs, rewards in zip(self._logs, self._rewards, strict=True):
            returns, total = [], 0.0
            for reward in reversed(rewards):
                total = reward + 0.95 * total
                returns.append(total)
            value = torch.tensor(returns[::-1])
            terms.append(-(torch.stack(logs) * (value - value.mean())).sum())
        loss = torch.stack(terms).sum()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self._forget()
        return loss.item()


def select_action(agent: Any, observer: int, state: torch.Tensor) -> int:
    return agent.local_value().select_action(observer, state)


def report_reward(agent: Any, observer: int, reward: float) -> None:
    agent.local_value().report_reward(observer, reward)


def prepare(api: Api) -> Step:
    agent = Agent()
    own = api.rpc.RRef(agent)
    observers = [api.rpc.remote(f"w{number + 1}", Observer, args=(number,)) for number in range(OBSERVERS)]

    def step() -> float:
        torch.futures.wait_all([observer.rpc_async().run_episode(own) for observer in observers])
        return agent.finish_episode()

    return step


def alone() -> Step:
    agent = Agent()
    worlds = [World(number) for number in range(OBSERVERS)]

    def step() -> float:
        for number, world in enumerate(worlds):
            state = world.reset()
            for _ in range(ACTIONS):
                state, reward = world.step(agent.select_action(number, state))
                agent.report_reward(number, reward)
        return agent.finish_episode()

    return step
