"""Options of the backends, and timeouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from farprop.rpc import constants
from farprop.wire.message import MAX_TIMEOUT

DeviceType: TypeAlias = int | str | torch.device


class RpcBackendOptions:
    """Options that every backend has.

    Args:
        rpc_timeout: The default timeout of calls in seconds; 0 disables it.
        init_method: How workers find each other: a URL or a c10d ``Store``.

    Raises:
        TypeError: ``rpc_timeout`` is not a number.
        ValueError: It is negative.
    """

    rpc_timeout: float
    init_method: Any

    def __init__(
        self,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: Any = constants.DEFAULT_INIT_METHOD,
    ) -> None:
        if isinstance(rpc_timeout, bool) or not isinstance(rpc_timeout, int | float):
            raise TypeError(
                f"incompatible constructor arguments: rpc_timeout is a number of seconds, not {rpc_timeout!r}."
            )
        if rpc_timeout < 0:
            raise ValueError(f"rpc_timeout must be 0 (no timeout) or more seconds, not {rpc_timeout}.")
        self.rpc_timeout = float(rpc_timeout) if rpc_timeout < MAX_TIMEOUT else 0.0
        self.init_method = init_method


class _TensorPipeRpcBackendOptionsBase(RpcBackendOptions):
    """Options as the agent needs them: devices are ``torch.device`` objects."""

    num_worker_threads: int
    device_maps: dict[str, dict[torch.device, torch.device]]
    devices: list[torch.device]

    def __init__(
        self,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: Any = constants.DEFAULT_INIT_METHOD,
        device_maps: Mapping[str, Mapping[torch.device, torch.device]] = MappingProxyType({}),
        devices: Sequence[torch.device] = (),
    ) -> None:
        # _transports and _channels name parts of TensorPipe. They are accepted for torch's code, and ignored.
        super().__init__(rpc_timeout, init_method)
        if not isinstance(num_worker_threads, int) or num_worker_threads < 1:
            raise ValueError(f"num_worker_threads must be 1 or more, not {num_worker_threads!r}.")
        self.num_worker_threads = num_worker_threads
        self.device_maps = {to: dict(device_map) for to, device_map in device_maps.items()}
        self.devices = list(devices)

    def _set_device_map(self, to: str, device_map: Mapping[torch.device, torch.device]) -> None:
        """Add to the device map for the worker ``to``."""
        self.device_maps.setdefault(to, {}).update(device_map)


class TensorPipeRpcBackendOptions(_TensorPipeRpcBackendOptionsBase):
    """Options of farprop's backend, under the name that torch gives its own.

    Args:
        num_worker_threads: How many calls of other workers run here at once.
        rpc_timeout: The default timeout of calls in seconds; 0 disables it.
        init_method: How workers find each other: ``env://``, ``tcp://host:port``, ``file:///path`` or a c10d ``Store``.
        device_maps: For each callee, a map from local devices to devices of the callee, for example
            ``{"worker1": {"cuda:0": "cuda:1"}}``. Answers use the inverse, so a map must be one to one. A tensor on a
            device that is not mapped is an error before anything is sent. CPU tensors stay on the CPU unless the map
            has ``"cpu"``. See ``docs/devices.md``.
        devices: Local devices used by calls. If given, maps may name no others.

    Raises:
        TypeError: ``rpc_timeout`` is not a number.
        ValueError: A number is out of range, or a device map is not one to one.
    """

    def __init__(
        self,
        *,
        num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
        rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
        init_method: Any = constants.DEFAULT_INIT_METHOD,
        device_maps: dict[str, dict[DeviceType, DeviceType]] | None = None,
        devices: list[DeviceType] | None = None,
        _transports: list[str] | None = None,
        _channels: list[str] | None = None,
    ) -> None:
        super().__init__(
            num_worker_threads,
            _transports,
            _channels,
            rpc_timeout,
            init_method,
            {to: _to_device_map(device_map) for to, device_map in (device_maps or {}).items()},
            _to_device_list(devices or []),
        )

    def set_device_map(self, to: str, device_map: dict[DeviceType, DeviceType]) -> None:
        """Add to the device map for a callee.

        Args:
            to: The name of the callee.
            device_map: A map from local devices to devices of the callee.

        Raises:
            ValueError: The map is not one to one. It has to be, because answers use its inverse.
        """
        added, before = _to_device_map(device_map), self.device_maps.get(to, {})
        for source, target in added.items():
            if before.get(source, target) != target:
                raise ValueError(
                    f"`set_device_map` only supports 1-to-1 mapping, trying to map {source} to {target} "
                    f"and {before[source]}"
                )
        _to_device_map({**before, **added})  # raises if the map is not one to one
        self._set_device_map(to, added)

    def set_devices(self, devices: list[DeviceType]) -> None:
        """Set the local devices used by calls.

        Args:
            devices: The devices.
        """
        self.devices = _to_device_list(devices)


def _to_device(device: DeviceType) -> torch.device:
    # Torch accepts CUDA devices only. Farprop accepts any kind.
    return torch.device(device)


def _to_device_list(devices: Sequence[DeviceType]) -> list[torch.device]:
    return [_to_device(device) for device in devices]


def _to_device_map(device_map: Any) -> dict[torch.device, torch.device]:
    full: dict[torch.device, torch.device] = {}
    sources: dict[torch.device, torch.device] = {}
    for given_source, given_target in device_map.items():
        source, target = torch.device(given_source), torch.device(given_target)
        if target in sources:
            raise ValueError(
                f"`device_map` only supports 1-to-1 mapping, trying to map {source} and {sources[target]} to {target}"
            )
        full[source] = target
        sources[target] = source
    return full


def checked_timeout(timeout: float) -> float | None:
    """Check a timeout that a program gave.

    Args:
        timeout: Seconds; 0 disables the timeout.

    Returns:
        The timeout in seconds, or None for 0 and for many years: no timeout.

    Raises:
        ValueError: It is negative or NaN.
    """
    if not timeout >= 0:
        raise ValueError(f"A timeout is 0 (no timeout) or more seconds, not {timeout}.")
    return float(timeout) if 0 < timeout < MAX_TIMEOUT else None
