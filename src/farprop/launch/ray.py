"""Workers that Ray places on the nodes of its cluster, and restarts: ``farprop.launch.ray.workers``."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

try:
    import ray
    from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError
    from ray.util import get_node_ip_address, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ImportError("farprop.launch.ray needs Ray: pip install 'farprop[ray]'") from error

import farprop.rpc as rpc
from farprop.errors import ConnectionLostError, RendezvousError, RpcTimeoutError, UsageError
from farprop.launch.pool import WorkerPool
from farprop.launch.spec import WorkerSpec, join
from farprop.runtime.liveness import PATIENCE

_ROOM_SECONDS = 0.2  # between two looks at whether Ray has found room, and whether the start was interrupted
_END_SECONDS = 10.0  # that Ray has to end the actors
_ANSWER_SECONDS = 5.0  # that a worker has to answer, before it is asked again
_PAUSE_SECONDS = 0.1
# A worker that Ray has started again has to wait for the death of the one whose name it takes, if its host vanished.
_JOIN_SECONDS = PATIENCE + 60.0


class _Actor:
    """The process of a worker. Ray makes it again, with the same arguments, when it has died."""

    def __init__(self, spec: WorkerSpec) -> None:
        join(spec, _leave_it_to_ray, _JOIN_SECONDS)

    def wait(self) -> None:
        """Never returns: that it fails tells the driver of the actor's end."""
        threading.Event().wait()


def _leave_it_to_ray() -> None:
    """The driver has stopped the pool or died. Ray ends the actors then; if they ended here, it would restart them."""


class RayWorkers(WorkerPool):
    """Workers that are actors of Ray's, as :func:`workers` makes them."""

    def __init__(
        self,
        count: int,
        resources: Mapping[str, float],
        strategy: str,
        runtime_env: Mapping[str, Any] | None,
        max_restarts: int,
        timeout: float,
    ) -> None:
        super().__init__(count, timeout)
        self._resources = dict(resources)
        self._strategy = strategy
        self._runtime_env = runtime_env
        self._max_restarts = max_restarts
        self._group: Any = None
        self._actors: dict[str, Any] = {}
        self._waits: dict[str, Any] = {}  # by name of the worker: the call of ``wait`` that is under way
        self._dead: dict[str, str] = {}

    def wait_until_up(self, timeout: float = 300.0) -> None:
        """Wait until all workers answer: until Ray has restarted those that have died.

        Call this after an error, before the job goes on from its checkpoint. The new processes have none of the values
        of the old ones.

        Args:
            timeout: The seconds to wait.

        Raises:
            ConnectionLostError: A worker has died, and Ray does not restart it.
            RpcTimeoutError: They were not up in time. The text says who is missing.
            UsageError: The pool does not run.
        """
        self._running_agent()
        deadline = time.monotonic() + timeout
        for worker in self:
            while not _answers(worker.name):
                if how := self._ended().get(worker.name):
                    raise ConnectionLostError(f"{worker.name} {how}")
                if time.monotonic() > deadline:
                    raise RpcTimeoutError(f"{worker.name} was not up within {timeout:g} s. Has Ray room for it?")
                time.sleep(_PAUSE_SECONDS)

    def _store_host(self) -> str:
        if not ray.is_initialized():
            ray.init()
        if ray.util.client.ray.is_connected():
            raise UsageError(
                "The workers must reach the driver, so it has to run on a node of Ray's cluster, and not connect with "
                "ray://. Submit it as a job: ray job submit -- python script.py"
            )
        return str(get_node_ip_address())

    def _start_processes(self, specs: Sequence[WorkerSpec]) -> None:
        self._group = placement_group([self._resources] * len(specs), self._strategy)
        self._wait_for_room()
        known = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
        options: dict[str, Any] = {known[name]: amount for name, amount in self._resources.items() if name in known}
        options["resources"] = {name: amount for name, amount in self._resources.items() if name not in known}
        options.setdefault("num_cpus", 0)
        actor = ray.remote(_Actor)
        for index, spec in enumerate(specs):
            self._actors[spec.name] = actor.options(
                **options,
                max_restarts=self._max_restarts,
                runtime_env=self._runtime_env,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index, placement_group_capture_child_tasks=False
                ),
            ).remote(spec)
            self._waits[spec.name] = self._actors[spec.name].wait.remote()

    def _wait_for_room(self) -> None:
        deadline = time.monotonic() + self._timeout
        while not self._group.wait(_ROOM_SECONDS):
            if self._hurry.is_set():
                raise RendezvousError("The start of the workers was interrupted.")
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"Ray had no room for {len(self)} workers with {self._resources} each ({self._strategy}) within "
                    f"{self._timeout:g} s. It has: {ray.available_resources()}"
                )

    def _ended(self) -> dict[str, str]:
        done, _ = ray.wait(list(self._waits.values()), num_returns=len(self._waits), timeout=0)
        for name, wait in list(self._waits.items()):
            if wait not in done:
                continue
            try:
                ray.get(wait)
            except ActorDiedError as error:
                self._dead[name] = f"has ended for good: {error}"
                del self._waits[name]
            except RayActorError:  # Ray restarts it
                self._waits[name] = self._actors[name].wait.remote()
        return dict(self._dead)

    def _end_processes(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor, no_restart=True)
        for wait in self._waits.values():
            with suppress(RayError, GetTimeoutError):
                ray.get(wait, timeout=_END_SECONDS)
        if self._group is not None:
            remove_placement_group(self._group)


def _answers(name: str) -> bool:
    try:
        rpc.rpc_sync(name, os.getpid, timeout=_ANSWER_SECONDS)
    except (ConnectionLostError, RpcTimeoutError):
        return False
    return True


def workers(
    count: int,
    *,
    resources: Mapping[str, float] | None = None,
    strategy: str = "SPREAD",
    runtime_env: Mapping[str, Any] | None = None,
    max_restarts: int = 0,
    timeout: float = 120.0,
) -> RayWorkers:
    """Make a pool of workers on the nodes of a Ray cluster.

    This process becomes the worker ``driver``, and has to run on a node of the cluster. The others are ``worker0``,
    ``worker1`` and so on: each is an actor of Ray's, and all are in one placement group. They end with this process,
    however it ends. If ``ray.init`` was not called, it is.

    An actor that has died is restarted by Ray, ``max_restarts`` times, also on another node. It takes its name again,
    and has none of the old one's values. Calls to the old one raise ``ConnectionLostError``, and references to its
    values ``ReferenceLostError``; ``wait_until_up`` waits for the new one.

    Args:
        count: The number of workers.
        resources: What each of them needs, in Ray's words, such as ``{"CPU": 4, "GPU": 1}``. By default one CPU.
        strategy: How to place them: ``SPREAD``, ``PACK``, ``STRICT_SPREAD`` or ``STRICT_PACK``.
        runtime_env: Their runtime environment: packages, files, variables such as ``FARPROP_PORT_RANGE``.
        max_restarts: How often Ray restarts each of them; -1 for always.
        timeout: The seconds that Ray has to find room, and that the workers have to start then.

    Returns:
        The pool. A ``with`` block starts and stops it, or its methods ``start`` and ``stop``.

    Raises:
        UsageError: The number of workers is not 1 or more.

    Example:
        ``with farprop.launch.ray.workers(8, resources={"GPU": 1}, max_restarts=-1) as w: ...``
    """
    return RayWorkers(count, resources or {"CPU": 1}, strategy, runtime_env, max_restarts, timeout)
