"""Right and wrong uses of the API, for type checkers. It is never run: ``test_types.py`` has mypy and Pyright read it.

A comment ``#: type`` is the type that both reveal. ``#: error`` is a mistake that both report, ``#: error in mypy`` one
that only mypy does; there ``reveal_type`` is of no interest. Lines without such a comment have no errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict, TypeVar, cast

import torch
from torch import Tensor, nn

import farprop.rpc as rpc
from farprop.nn import RemoteModule
from farprop.optim import DistributedOptimizer
from farprop.rpc.functions import async_execution

if TYPE_CHECKING:
    from typing import reveal_type

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Options(TypedDict):
    depth: int


def two(a: int, b: str) -> float:
    return a + len(b)


def with_defaults(a: int, b: str = "", *, c: float = 0.0) -> bytes:
    return b""


def with_required_keyword(a: int, *, b: str) -> bytes:
    return b""


def variadic(a: int, *rest: Any, **named: Any) -> bytes:
    return b""


def nothing() -> None: ...


def scale(x: float, mode: Literal["up", "down"] = "up") -> int:
    return 0


def optional(x: int | None) -> int | None:
    return x


def mean(values: Sequence[float]) -> float:
    return 0.0


def in_place(values: list[float]) -> float:
    return 0.0


def configure(options: Options) -> int:
    return 0


def first(values: list[T]) -> T:
    return values[0]


def untyped(a, b):  # type: ignore[no-untyped-def]
    return a


def anything(a: int) -> Any:
    return a


def predict(x: Tensor, y: Tensor) -> Tensor:
    return x


async def coroutine(a: int) -> str:
    return ""


@async_execution
def later(a: int) -> torch.futures.Future[str]:
    return torch.futures.Future()


class Counter:
    def __init__(self, start: int) -> None:
        self.total = start

    def add(self, n: int = 1) -> int:
        return n

    async def wait_for(self, n: int) -> str:
        return ""

    @staticmethod
    def parse(text: str) -> bytes:
        return b""

    @classmethod
    def make(cls, n: int) -> Counter:
        return cls(n)


class Net(nn.Module):
    def __init__(self, width: int, depth: int = 2) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x


x = torch.ones(2)
counter = Counter(1)


def results_of_calls() -> None:
    reveal_type(rpc.rpc_sync("w", two, args=(1, "a")))  #: float
    reveal_type(rpc.rpc_sync(1, two, (1, "a"), None, 5.0))  #: float
    reveal_type(rpc.rpc_sync("w", two, args=(1, "a"), timeout=5, retry=rpc.Retry(3)))  #: float
    reveal_type(rpc.rpc_async("w", two, args=(1, "a")))  #: Future[float]
    reveal_type(rpc.rpc_async("w", two, args=(1, "a")).wait())  #: float
    reveal_type(rpc.remote("w", two, args=(1, "a")))  #: RRef[float]
    reveal_type(rpc.remote("w", two, args=(1, "a")).to_here())  #: float
    reveal_type(rpc.rpc_sync("w", nothing))  #: None
    reveal_type(rpc.rpc_sync("w", nothing, args=()))  #: None
    reveal_type(rpc.rpc_sync("w", optional, args=(None,)))  #: int | None
    reveal_type(rpc.rpc_sync("w", first, args=([1, 2],)))  #: int
    reveal_type(rpc.rpc_sync("w", lambda a: a + 1, args=(1,)))  #: int
    reveal_type(rpc.rpc_sync("w", anything, args=(1,)))  #: Any
    rpc.rpc_sync("w", untyped, args=(1, 2)).no_matter.what()


def results_of_coroutines_and_futures() -> None:
    reveal_type(rpc.rpc_sync("w", coroutine, args=(1,)))  #: str
    reveal_type(rpc.rpc_async("w", coroutine, args=(1,)))  #: Future[str]
    reveal_type(rpc.remote("w", coroutine, args=(1,)))  #: RRef[str]
    reveal_type(rpc.rpc_sync("w", later, args=(1,)))  #: str
    reveal_type(rpc.rpc_async("w", later, args=(1,)))  #: Future[str]
    reveal_type(rpc.remote("w", later, args=(1,)))  #: RRef[str]
    reveal_type(rpc.rpc_sync("w", later, kwargs={"a": 1}))  #: str
    reveal_type(rpc.rpc_sync("w", coroutine, args=[1]))  #: str
    reveal_type(rpc.rpc_sync("w", counter.wait_for, args=(1,)))  #: str


def results_of_operators_classes_and_methods() -> None:
    reveal_type(rpc.rpc_sync("w", torch.add, args=(x, x)))  #: Tensor
    reveal_type(rpc.rpc_sync("w", torch.add, args=(x, 1)))  #: Tensor
    reveal_type(rpc.rpc_sync("w", torch.add, args=(x, x), kwargs={"alpha": 2}))  #: Tensor
    reveal_type(rpc.rpc_sync("w", torch.maximum, args=(x, x)))  #: Tensor
    reveal_type(rpc.rpc_sync("w", torch.max, args=(x, x)))  #: Tensor
    reveal_type(rpc.rpc_sync("w", torch.ones, args=(2, 2)))  #: Tensor
    reveal_type(rpc.remote("w", nn.Linear, args=(2, 3)))  #: RRef[Linear]
    reveal_type(rpc.remote("w", nn.Linear, args=(2,), kwargs={"out_features": 3}))  #: RRef[Linear]
    reveal_type(rpc.remote("w", nn.LSTM, args=(2, 3)))  #: RRef[LSTM]
    reveal_type(rpc.remote("w", Counter, args=(1,)))  #: RRef[Counter]
    reveal_type(rpc.rpc_sync("w", counter.add, args=(1,)))  #: int
    reveal_type(rpc.rpc_sync("w", counter.add))  #: int
    reveal_type(rpc.rpc_sync("w", Counter.add, args=(counter, 1)))  #: int
    reveal_type(rpc.rpc_sync("w", Counter.parse, args=("1",)))  #: bytes
    reveal_type(rpc.rpc_sync("w", Counter.make, args=(1,)))  #: Counter
    reveal_type(rpc.rpc_sync("w", "predict", args=(x,)))  #: Any
    reveal_type(rpc.rpc_async("w", "predict", args=(x,), kwargs={"y": x}))  #: Future[Any]
    reveal_type(rpc.remote("w", "predict"))  #: RRef[Any]


def arguments_that_fit() -> None:
    reveal_type(rpc.rpc_sync("w", with_defaults, args=(1,)))  #: bytes
    reveal_type(rpc.rpc_sync("w", with_defaults, args=(1, "b")))  #: bytes
    reveal_type(rpc.rpc_sync("w", with_defaults, args=(1,), kwargs={"c": 1.0}))  #: bytes
    reveal_type(rpc.rpc_sync("w", with_defaults, (1,), {"c": 1.0}))  #: bytes
    reveal_type(rpc.rpc_sync("w", with_defaults, None, {"a": 1}))  #: bytes
    reveal_type(rpc.rpc_sync("w", with_required_keyword, args=(1,), kwargs={"b": ""}))  #: bytes
    reveal_type(rpc.rpc_sync("w", variadic, args=(1, 2, "3")))  #: bytes
    reveal_type(rpc.rpc_sync("w", scale, args=(1, "down")))  #: int
    reveal_type(rpc.rpc_sync("w", mean, args=([1, 2],)))  #: float
    reveal_type(rpc.rpc_sync("w", in_place, args=([],)))  #: float
    reveal_type(rpc.rpc_sync("w", two, args=[1, "a"]))  #: float


def arguments_that_do_not_fit() -> None:
    rpc.rpc_sync("w", two, args=(1,))  #: error
    rpc.rpc_sync("w", two, args=(1, 2))  #: error
    rpc.rpc_sync("w", two, args=(1, "a", 3))  #: error
    rpc.rpc_sync("w", two, (1, 2))  #: error
    rpc.rpc_sync("w", two)  #: error
    rpc.rpc_sync("w", nothing, args=(1,))  #: error
    rpc.rpc_sync("w", optional, args=(1))  #: error
    rpc.rpc_sync("w", optional, args=1)  #: error
    rpc.rpc_sync("w", Counter.parse, args="ab")  #: error
    rpc.rpc_sync("w", predict, args=x)  #: error
    rpc.rpc_sync("w", two, kwargs=[1])  #: error
    rpc.rpc_sync("w", with_defaults, args=())  #: error
    rpc.rpc_sync("w", with_defaults, args=(1, 2))  #: error
    rpc.rpc_sync("w", with_required_keyword, args=(1,))  #: error
    rpc.rpc_sync("w", scale, args=(1, "sideways"))  #: error
    rpc.rpc_sync("w", mean, args=(["a"],))  #: error
    rpc.rpc_sync("w", predict, args=(x,))  #: error
    rpc.rpc_sync("w", coroutine, args=("a",))  #: error
    rpc.rpc_async("w", later, args=("a",))  #: error
    rpc.rpc_async("w", torch.neg, args=("a",))  #: error
    rpc.rpc_async("w", torch.add, args=(x,))  #: error
    rpc.remote("w", nn.Linear, args=("a", 3))  #: error
    rpc.remote("w", Counter, args=("a",))  #: error
    rpc.remote("w", Counter)  #: error
    rpc.rpc_sync("w", counter.add, args=("a",))  #: error
    rpc.rpc_sync("w", 3, args=())  #: error
    rpc.rpc_sync("w", two, args=(1, "a"), timeout="5")  #: error
    n: int = rpc.rpc_sync("w", coroutine, args=(1,))  #: error
    n = rpc.rpc_async("w", scale, args=(1.0,))  #: error
    print(n)


def functions_that_pass_calls_on(
    f: Callable[..., R], g: Callable[P, R], maybe: tuple[Any, ...] | None, options: dict[str, Any] | None
) -> None:
    def one(*args: Any, **kwargs: Any) -> R:
        rpc.rpc_sync("w", f, args=(x, *args))
        rpc.rpc_sync("w", f, maybe, options)
        rpc.rpc_sync("w", variadic, args=(1, *args))
        rpc.rpc_sync("w", two, args=args)
        rpc.rpc_sync("w", two, args=[1, *args])
        return rpc.rpc_sync("w", f, args, kwargs)

    def two_of(*args: P.args, **kwargs: P.kwargs) -> R:
        return rpc.rpc_sync("w", g, args, kwargs)

    one()
    two_of()  # type: ignore[call-arg]  # pyright: ignore


def what_is_reported_although_it_is_right(tensors: list[Tensor], numbers: tuple[int, ...], *rest: Any) -> None:
    rpc.rpc_sync("w", scale, args=numbers)  #: error
    rpc.rpc_sync("w", predict, args=tuple(tensors))  #: error
    rpc.rpc_sync("w", two, args=(1, *rest))  #: error in pyright
    rpc.rpc_sync("w", in_place, args=([1, 2],))  #: error in mypy
    rpc.rpc_sync("w", configure, args=({"depth": 1},))  #: error in mypy
    # The way out: a list.
    rpc.rpc_sync("w", scale, args=[*numbers])
    rpc.rpc_sync("w", predict, args=tensors)
    rpc.rpc_sync("w", two, args=[1, *rest])
    rpc.rpc_sync("w", in_place, args=[[1, 2]])
    rpc.rpc_sync("w", configure, args=[{"depth": 1}])


def references() -> None:
    reveal_type(rpc.RRef(counter))  #: RRef[Counter]
    reveal_type(rpc.RRef(counter).local_value())  #: Counter
    rref = rpc.remote("w", Counter, args=(1,))
    reveal_type(rref.rpc_sync().add(2))  #: int
    reveal_type(rref.rpc_sync(timeout=5).add())  #: int
    rref.rpc_sync().add("a")  #: error
    rref.rpc_sync().subtract(2)  #: error
    reveal_type(rref.rpc_async().add(2))  #: Future[Any]
    reveal_type(rref.remote().add(2))  #: RRef[Any]
    reveal_type(rpc.rpc_sync("w", two, args=(rref.rpc_sync().add(2), "a")))  #: float
    anywhere: rpc.RRef[nn.Module] = rpc.remote("w", nn.Linear, args=(2, 3))
    anywhere.rpc_sync()(x)
    wrong: rpc.RRef[Counter] = rpc.remote("w", nn.Linear, args=(2, 3))  #: error
    print(wrong)


def modules() -> None:
    layer = RemoteModule("w", nn.Linear, args=(2, 3))
    reveal_type(layer)  #: RemoteModule[Linear]
    reveal_type(layer.get_module_rref())  #: RRef[Linear]
    reveal_type(layer.module_rref.to_here())  #: Linear
    reveal_type(layer.remote_parameters())  #: list[RRef[Parameter]]
    reveal_type(RemoteModule("w", Net, args=(3,)))  #: RemoteModule[Net]
    reveal_type(RemoteModule("w", Net, kwargs={"width": 3}))  #: RemoteModule[Net]
    reveal_type(RemoteModule("w", Net, [3]))  #: RemoteModule[Net]
    reveal_type(RemoteModule.init_from_module_rref("w", layer.module_rref))  #: RemoteModule[Linear]
    RemoteModule("w", Net, args=("a",))  #: error
    RemoteModule("w", Net, args=(3))  #: error
    RemoteModule("w", Net)  #: error
    RemoteModule("w", Counter, args=(1,))  #: error
    anyone: RemoteModule = layer
    DistributedOptimizer(torch.optim.SGD, anyone.remote_parameters(), lr=0.1)
    cast(Callable[[Tensor], Tensor], layer)(x)


async def many(names: list[str]) -> None:
    futures = rpc.broadcast(names, two, args=(1, "a"))
    reveal_type(futures)  #: dict[str, Future[float]]
    reveal_type(rpc.gather(futures))  #: dict[str, float]
    reveal_type(rpc.gather(futures, return_exceptions=True))  #: dict[str, float | Exception]
    for future in futures.values():
        reveal_type(await future)  #: float
        future.cancel()
    reveal_type(rpc.broadcast(names, coroutine, [1]))  #: dict[str, Future[str]]
    reveal_type(rpc.broadcast(names, later, kwargs={"a": 1}))  #: dict[str, Future[str]]
    reveal_type(rpc.broadcast(names, "name"))  #: dict[str, Future[Any]]
    mapped = rpc.map(names, two, [(1, "a"), (2, "b")])
    reveal_type(mapped)  #: list[Future[float]]
    reveal_type(rpc.gather(mapped))  #: list[float]
    reveal_type(await asyncio.gather(*mapped))  #: list[float]
    reveal_type(rpc.gather(list(futures.values())))  #: list[float]
    rpc.map(names, coroutine, [[1], [2]])
    rpc.broadcast(names, two, args=(1))  #: error
    rpc.map(names, two, [1, 2])  #: error
    rpc.gather(rpc.remote("w", two, args=(1, "a")))  #: error
    rpc.gather(future)  #: error


def items(n: int) -> Iterator[int]:
    yield n


async def later_items(n: int) -> AsyncIterator[str]:
    yield ""


async def streams() -> None:
    for item in rpc.stream("w", items, args=(1,)):
        reveal_type(item)  #: int
    async for text in rpc.stream("w", later_items, [1], window=4):
        reveal_type(text)  #: str
    reveal_type(rpc.stream("w", later_items, kwargs={"n": 1}))  #: Stream[str]
    rpc.stream("w", two, args=(1, "a"))  #: error
    rpc.stream("w", items, args=(1))  #: error
