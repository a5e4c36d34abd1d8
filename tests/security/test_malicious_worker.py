"""A malicious worker of a restricted job, which has the job's key: it can neither run code nor break other workers."""

from __future__ import annotations

import pickle
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.errors import ConnectionLostError, FarpropError
from farprop.nn import remote_module
from farprop.optim import local
from farprop.protocol.backward import ALL, PassId
from farprop.protocol.references.records import Fork
from farprop.rpc.restricted import _INTERNAL
from farprop.runtime.agent_registry import current_agent
from farprop.wire.message import (
    CONTEXT,
    FAILURE,
    FAST,
    REFS,
    REMOTE,
    RETURNS,
    SYSTEM,
    TRACED,
    Message,
    Method,
    PassHead,
)
from tests.security import functions as f
from tests.support.raw_messages import RawMessage, pack_fork, pack_forks
from tests.support.workers import Cluster, cluster

pytestmark = pytest.mark.one_transport

VICTIM, ATTACKER, BYSTANDER = range(3)
ECHO = b"tests.security.functions:echo"
pack = msgspec.msgpack.encode


@pytest.fixture(scope="module")
def _job() -> Iterator[Cluster]:
    with cluster(3, env={"FARPROP_RESTRICTED": "1"}, options={"rpc_timeout": 10}, check=False) as job:
        for rank in range(3):
            assert job.run(rank, _imported, "farprop.optim")  # imports this module, with all that it needs
        yield job
        job.kill(ATTACKER)
        _serves(job)  # also without the attacker


@pytest.fixture
def job(_job: Cluster) -> Iterator[Cluster]:
    """Check after each attack that no forbidden code has run, and that the victim still serves other workers."""
    yield _job
    assert _job.run(VICTIM, f.called) == []
    _serves(_job)


def _serves(job: Cluster) -> None:
    assert job.run(BYSTANDER, rpc.rpc_sync, "worker0", f.add, (1,)) == 2
    assert job.run(VICTIM, rpc.rpc_sync, "worker2", f.add, (1,)) == 2
    assert job.run(BYSTANDER, _use_reference) == 1


def _use_reference() -> int:
    return int(rpc.remote("worker0", f.Counter).rpc_sync().add(1))


def _send(name: bytes, meta: bytes, flags: int = 0, buffers: Any = ()) -> tuple[int, Any]:
    """In the attacker, send a message; returns the kind and the content of the answer."""
    agent = current_agent()
    message = RawMessage(meta, [memoryview(b) for b in buffers], None, flags)
    message.name = name
    try:
        answer = agent.peers.connect("worker0").call_sync(message, 10.0)
    except ConnectionLostError:
        return 0, "it hung up"
    if answer.kind == FAILURE:
        return FAILURE, repr(agent.dialect.decode_failure(answer.payload))
    return answer.kind, "it answered"


# Pickles


class Bomb:
    """Creates a file if it is ever unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def _send_pickles(path: str) -> list[Any]:
    bomb = Bomb(path)
    one = Fork(1, rpc.RRef(1)._owned.rref, rpc.RRef(1)._owned.rref, True)  # type: ignore[union-attr]
    heads = {
        0: b"",
        FAST: b"",
        SYSTEM: b"",
        TRACED: bytes(4),
        CONTEXT: struct.pack("<QQII", 1 << 48, 0, 0, 0),
        CONTEXT | FAST: struct.pack("<QQII", 1 << 48, (1 << 48) + 5, 1, 0),
        REFS: pack_forks([]),
        REMOTE: pack_fork(one) + b"\0\0",
        REFS | REMOTE: pack_forks([]) + pack_fork(one) + b"\0\0",
    }
    said = []
    for flags, head in heads.items():
        for name in (ECHO, b"", *_INTERNAL):
            for whole in (((bomb,), {}), (bomb, (), {}), (0, (bomb,)), (bomb, bomb, bomb, bomb), bomb):
                said.append(_send(name, head + pickle.dumps(whole, 5), flags))
    return said


def test_pickles_are_never_loaded(job: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "boom"
    for kind, text in job.run(ATTACKER, _send_pickles, str(path)):
        assert kind in (0, FAILURE) or text == "it answered", text  # a remote() is answered before it has run
    assert not path.exists()


# Names


def _send_names(path: str) -> list[tuple[int, str]]:
    said = []
    paths = pack([path])
    command = pack([f"touch {path}"])
    for name in (
        *("os:system", "posix:system", "os:mkdir", "builtins:eval", "builtins:exec", "builtins:open", "subprocess:run"),
        *("importlib:import_module", "torch:load", "pickle:loads", "cloudpickle:loads", "torch.jit:load", "this:s"),
        *("farprop.rpc.internal:run_pickled", "farprop.rpc.internal:run_pickled_async", "farprop.wire.codec:decode"),
        *("farprop.rpc.rref_proxy:_local_invoke", "farprop.rpc.rref_proxy:_local_invoke_async_execution"),
        *(
            "farprop.runtime.references.rpc_handlers:backward_from_value",
            "farprop.runtime.agent_registry:current_agent",
            "farprop.rpc.api:shutdown",
        ),
        *(
            "farprop.rpc.rref_proxy:_rref_typeof_on_owner",
            "farprop.wire.exposed:add",
            "farprop.rpc:rpc_sync",
        ),
        *("farprop.nn.remote_module:_recursive_script_module_receiver", "farprop.wire.codec:_load_script_module"),
        *("\x00", "\x0f", "\x1d", "\x02x"),
        *("farprop.nn.remote_module:_create_compiled_module", "farprop.jit.calls:call", "farprop.compat:install"),
        *(
            "tests.security.functions:hidden",
            "tests.security.functions:Counter.reset",
            "tests.security.functions:called",
        ),
        *("tests.security.functions:Counter.add", "tests.security.functions:rpc.rpc_sync"),
        *(
            "tests.security.functions:echo.__globals__",
            "tests.security.functions:echo.__class__",
            ":",
            "echo",
            "a" * 9000,
        ),
        *(
            "tests.security.functions",
            "tests.security.functions:",
            "../../etc/passwd",
            "farprop.runtime.references.rpc_handlers:",
        ),
    ):
        said += [_send(name.encode(), meta, FAST) for meta in (paths, command, b"\x90")]
    said += [_send(name, paths, FAST) for name in (b"\xff\xfe", b"\0", b"x:\xff")]
    return said


def _imported(module: str) -> bool:
    return module in sys.modules


def test_names_that_are_not_exposed_are_refused(job: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "boom"
    for kind, text in job.run(ATTACKER, _send_names, str(path)):
        assert kind == FAILURE
        assert text.startswith("NotExposedError"), text
    assert not path.exists()
    assert not job.run(VICTIM, _imported, "this")


def _counter_on_the_victim() -> Any:
    job_counter = rpc.remote("worker0", f.Counter, (5,))
    job_counter.rpc_sync().add(0)
    return job_counter


def _invoke_hidden_methods() -> list[tuple[int, str]]:
    counter = _counter_on_the_victim()
    rref = counter._record.rref
    said = []
    for method in ("reset", "__init__", "__class__", "__dict__", "__reduce_ex__", "__getattribute__", "__setattr__",
                   "add.__globals__", "value", "", "\0", "add\0", "__farprop_exposed", "_farprop_exposed"):  # fmt: skip
        for function in (b"farprop.rpc.rref_proxy:invoke_on_owner", b"farprop.rpc.rref_proxy:invoke_here"):
            args: list[Any] = [rref.created_on, rref.local_id, True, method, 1, 2]
            if b"here" in function:
                args = [[16, 0], method, 1, 2]
            said.append(_send(function, pack(args), FAST))
    return said


def test_methods_that_are_not_exposed_are_refused(job: Cluster) -> None:
    for kind, text in job.run(ATTACKER, _invoke_hidden_methods):
        assert kind == FAILURE
        assert text.startswith(("NotExposedError", "ProtocolError")), text


def _call_through_helpers() -> list[str]:
    caller = rpc.remote("worker0", f.Caller)
    assert caller.rpc_sync().forward() == 1
    said = []
    for function, args in (
        (remote_module._run_forward, (caller, "cpu", (), {})),
        (remote_module._param_rrefs, (caller, True)),
        (remote_module._train, (caller, True)),
        (remote_module._create_module, (f.hidden, (), {}, "cpu")),
        (remote_module._create_module, (f.Caller, (), {}, "cpu")),
        (local._new_shard, (f.hidden, [caller], [0], (), {})),
        (local._new_shard, ("os:system", [caller], [0], (), {})),
        (remote_module._create_module, (b"os:system", (), {}, "cpu")),
    ):
        try:
            rpc.rpc_sync("worker0", function, args)
        except Exception as error:
            said.append(type(error).__name__)
    return said


def test_helpers_call_nothing_that_is_not_exposed(job: Cluster) -> None:
    refused = ["NotExposedError"] * 4
    said = job.run(ATTACKER, _call_through_helpers)
    assert said == [*refused, "ValueError", "NotExposedError", "ProtocolError", "ProtocolError"]


# Impersonation


def _impersonate_others() -> list[tuple[int, str]]:
    agent = current_agent()
    names = ("worker0", "worker1", "worker2")
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("farprop.rpc.api:_gather_to_leader", ((names, 0), "worker2", None)),
        ("farprop.rpc.api:_gather_to_leader", ((names, 0), "worker0", None)),
        ("farprop.rpc.api:_broadcast_to_followers", ((names, 0), {})),
        ("farprop.rpc.api:_release_follower", ((("worker0", "worker1"), 0), None)),
        ("farprop.rpc.api:_release_follower", (((), 0), None)),
        ("farprop.rpc.api:_release_follower", ((), None)),
        ("farprop.rpc.api:_release_follower", ((5, 0), None)),
        ("farprop.rpc.api:_gather_to_leader", (("worker1", 0), "worker1", None)),
        ("farprop.rpc.api:_gather_to_leader", (((1, 2), 0), "worker1", None)),
        (Method.ABORT.value.decode(), (1 << 48, 2, 1)),
    ]
    said = []
    for name, args in calls:
        encoded = agent.dialect.encode_call(None, args, {})
        said.append(_send(name.encode(), bytes(encoded.payload), encoded.flags))
    return said


def _call_as_system() -> Any:
    agent = current_agent()
    message = agent.dialect.encode_call(None, (), {})
    message.name, message.flags = b"tests.security.functions:waiting_requests", message.flags | SYSTEM
    answer = agent.peers.connect("worker0").call_sync(message, 10.0)
    return agent.dialect.decode_value(answer.payload, answer.buffers, answer.flags)


def test_system_flag_does_not_exempt_a_call_from_the_limits(job: Cluster) -> None:
    assert job.run(ATTACKER, _call_as_system) == 1


def test_impersonating_another_worker_is_a_protocol_error(job: Cluster) -> None:
    for kind, text in job.run(ATTACKER, _impersonate_others):
        assert kind == FAILURE
        assert text.startswith("ProtocolError"), text


def _ids() -> list[int]:
    references = [rpc.RRef(1)._owned, rpc.RRef(1)._owned]
    contexts = []
    for _ in range(2):
        with dist_autograd.context() as context:
            contexts.append(context)
    return [*(own.rref.local_id for own in references if own is not None), *contexts]


def test_reference_and_context_ids_cannot_be_guessed(job: Cluster) -> None:
    first, second, one_context, other_context = job.run(VICTIM, _ids)
    assert min(first, second, abs(first - second)) > 1 << 32
    assert abs(one_context - other_context) > 1 << 20


# Data


def _bad_data() -> list[bytes]:
    deep = [b"\x91" * 100_000, b"\x92\x00" * 5000 + b"\xc0", b"\x92\x01" * 200 + b"\xc0"]
    tensors: list[Any] = [
        [8, b"", 0, [1 << 40], False],
        [8, b"1234", 0, [-1], False],
        [8, 0, 0, [1000], False],
        [8, 5, 0, [1], False],
        [8, b"\x07", 15, [1], False],
        [8, b"12345678", 10, [1], True],
        [10, [b"\xff" * 8, 10, [1, 1], False], [b"1234", 0, [1], False], [2], False, False],
        [10, [b"\xff" * 8, 10, [1, 1], False], [b"1234", 0, [1], False], [2], True, False],
        [11, [b"\x7f" * 16, 10, [2], False], [b"\x7f" * 8, 10, [1], False], [b"1234", 0, [1], False], [1, 1], False],
        [9, 0],
        [16, 0],
        [17, b"os:system"],
        [15, b"tests.security.functions:Unknown", "x", 1],
        [15, b"tests.security.functions:Point", "x", "y", 13, None],
    ]
    return [*deep, *(pack([item]) for item in tensors), b"", b"\xc1", b"\xff" * 1000]


def _send_bad_data() -> list[tuple[int, str]]:
    return [
        _send(name, meta, flags)
        for meta in _bad_data()
        for name in (ECHO, Method.GRADIENTS.value)
        for flags in (FAST, 0)
    ]


def test_invalid_data_is_refused(job: Cluster) -> None:
    for kind, text in job.run(ATTACKER, _send_bad_data):
        assert kind == FAILURE
        assert text.startswith(("ProtocolError", "NotExposedError")), text


def _send_random_messages(seed: int) -> set[str]:
    """Random names, flags, heads, and arguments of any type."""
    chance = random.Random(seed)
    names = [ECHO, *_INTERNAL]

    def some(depth: int = 0) -> Any:
        kinds = [None, True, 0, 1, -1, 2**63, "worker0", b"", chance.randbytes(30), 1.5, [8, b"1234", 0, [1], False]]
        if depth < 3 and chance.random() < 0.5:
            return [chance.randrange(18), *[some(depth + 1) for _ in range(chance.randrange(4))]]
        return chance.choice(kinds)

    said = set()
    for _ in range(400):
        # Leave out methods that may wait forever.
        name = chance.choice(names)
        if name in (Method.FETCH.value, Method.REF_BACKWARD.value) or b"_gather" in name:
            continue
        flags = chance.choice((0, FAST, FAST, SYSTEM, CONTEXT, REFS, REFS | REMOTE, CONTEXT | FAST))
        head = b"" if not flags & (REFS | CONTEXT) else chance.randbytes(chance.randrange(60))
        if flags & REFS and chance.random() < 0.7:
            head = pack_forks([]) + head
        kind, text = _send(name, head + pack([some() for _ in range(chance.randrange(7))]), flags)
        said.add(text.partition("(")[0] if kind == FAILURE else text)
    return said


@pytest.mark.parametrize("seed", range(4))
def test_random_messages_cause_no_internal_error(job: Cluster, seed: int) -> None:
    said = job.run(ATTACKER, _send_random_messages, seed)
    assert "ProtocolError" in said
    assert not said & {"AssertionError", "AttributeError", "SystemError", "MemoryError"}, said


# Gradients


def _send_gradients() -> list[tuple[int, str]]:
    said = []
    agent = current_agent()
    wrong: list[tuple[Any, ...]] = [
        (),
        (torch.ones(3), torch.ones(3)),
        (torch.ones(2),),
        (torch.ones(3, 3),),
        (torch.tensor(1.0),),
        (torch.ones(3, dtype=torch.int64),),
        (torch.ones(3, dtype=torch.complex64),),
        (torch.ones(3).to_sparse(),),
        (5,),
        (-1,),
        (0,),
        (None,),
    ]
    for number, gradients in enumerate(wrong):
        with dist_autograd.context() as context_id:
            rpc.rpc_sync("worker0", f.weigh, (torch.ones(3, requires_grad=True),))
            (pair,) = dist_autograd._retrieve_context(context_id)._recv_functions()
            head = PassHead(context_id, pair, PassId(1, number + 1), 0, False, False, False, ALL).pack()
            encoded = agent.dialect.encode_call(None, (head, *gradients), {})
            said.append(_send(Method.GRADIENTS.value, bytes(encoded.payload), encoded.flags))
            for broken in (head[:-1], head + b"x", b"", b"\xff" * len(head)):
                encoded = agent.dialect.encode_call(None, (broken, torch.ones(3)), {})
                said.append(_send(Method.GRADIENTS.value, bytes(encoded.payload), encoded.flags))
    return said


def test_invalid_gradients_are_refused(job: Cluster) -> None:
    said = job.run(ATTACKER, _send_gradients)
    assert sum(kind == FAILURE for kind, _ in said) >= 40
    assert job.run(BYSTANDER, _gradient_of_weigh) == [1, 1, 1]


def _gradient_of_weigh() -> list[float]:
    with dist_autograd.context() as context_id:
        x = torch.ones(3, requires_grad=True)
        dist_autograd.backward(context_id, [rpc.rpc_sync("worker0", f.weigh, (x,)).sum()])
        return dist_autograd.get_gradients(context_id)[x].tolist()  # type: ignore[no-any-return]


# Answers


def _answer_with_garbage(seed: int, heads: bool) -> None:
    chance = random.Random(seed)
    flags = (0, FAST, REFS, CONTEXT, REFS | CONTEXT, RETURNS, REFS | RETURNS) if heads else (0, FAST)

    def garbage(*_: Any) -> Message:
        whole = chance.choice((chance.randbytes(40), pickle.dumps(Bomb("/nonexistent/x"), 5), *_bad_data()))
        return RawMessage(whole, [], None, chance.choice(flags))

    server = current_agent()._server
    server._encode_value = garbage  # type: ignore[assignment]
    server._dialect = server._dialect._replace(encode_failure=garbage, encode_value=garbage)


def _stop_answering_with_garbage() -> None:
    server, dialect = current_agent()._server, current_agent().dialect
    server._encode_value, server._dialect = dialect.encode_value, dialect


def _calls_that_get_garbage() -> set[str]:
    said = set()
    for number in range(150):
        try:
            if number % 3 == 0:
                rpc.rpc_sync("worker1", f.fail, ("value",))
            elif number % 3 == 1:
                rpc.rpc_async("worker1", f.add, (1,)).wait()
            else:
                with dist_autograd.context():
                    rpc.rpc_sync("worker1", f.add, (torch.ones(2, requires_grad=True),))
            said.add("a value")
        except Exception as error:
            said.add("typed" if isinstance(error, FarpropError) else repr(error))
    return said


@pytest.mark.parametrize("heads", [False, True])
def test_garbage_answers_raise_typed_errors(job: Cluster, heads: bool) -> None:
    job.run(ATTACKER, _answer_with_garbage, 1, heads)
    said = job.run(VICTIM, _calls_that_get_garbage)
    job.run(ATTACKER, _stop_answering_with_garbage)
    assert said <= {"typed", "a value"}, said
    assert "typed" in said
