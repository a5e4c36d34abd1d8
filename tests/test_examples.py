"""The examples and every block of Python in the documents work as described."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import pty
import re
import runpy
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest
import torch

import farprop.errors
import farprop.rpc as rpc
from farprop.config import Settings
from tests.support.workers import free_port, run_workers

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMPAT = (ROOT / "docs/compat.md").read_text()
# Warnings are errors in the examples, too.
PYTHON = [sys.executable, "-W", "error"]
SECONDS = 100


# Examples


def test_every_example_is_tested() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {
        "demo.py",
        "embeddings.py",
        "inference_service.py",
        "maml.py",
        "own_process_group.py",
        "parameter_server.py",
        "pipeline_transformer.py",
        "reinforcement_learning.py",
        "split_learning_restricted.py",
        "survive_failure.py",
    }


@pytest.mark.parametrize("page", sorted((ROOT / "docs/examples").glob("*.md")), ids=lambda page: page.stem)
def test_pages_of_examples_have_their_command_and_a_picture(page: Path) -> None:
    text = page.read_text()
    commands = re.findall(r"^```sh\n.*?(examples/\S+)\n```$", text, re.MULTILINE | re.DOTALL)
    assert commands
    assert all((ROOT / program).exists() for program in commands)
    images = [page.parent / image for image in re.findall(r"^!\[[^\]]+\]\((\S+)\)$", text, re.MULTILINE)]
    assert images or page.stem == "index"
    assert all(image.stat().st_size < 60_000 for image in images)


@contextlib.contextmanager
def _demo(**streams: Any) -> Iterator[subprocess.Popen[str]]:
    """The demo, in a group of processes that does not outlive the test."""
    environment = {**os.environ, "COLUMNS": "80"}
    command = [*PYTHON, "examples/demo.py"]
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, start_new_session=True, **streams) as demo:
        try:
            yield demo
            assert demo.wait(10) is not None
        finally:
            if demo.poll() is None:
                os.killpg(demo.pid, signal.SIGKILL)
    _wait_for_end_of_group(demo.pid)


def test_demo_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    output = b""
    with open(ours, "rb", buffering=0) as terminal, _demo(stdout=theirs, stderr=theirs) as demo:
        os.close(theirs)
        with contextlib.suppress(OSError):  # so a terminal ends
            while read := terminal.read(4096):
                output += read
    assert demo.returncode == 0, output
    start, page, *shown = output.decode().replace("\r\n", "\n").replace("\n", "\r").strip().split("\r")
    assert start.startswith("Starting four workers")
    assert re.fullmatch(r"Look at http://127\.0\.0\.1:\d+/\?token=\S+ while it runs\.", page)
    bars = [line for line in shown if line.startswith("[")]
    calls, where, heading, *workers, bubble, verdict = [line for line in shown if line and line not in bars]
    assert len(bars) == 150
    assert re.fullmatch(r"\[\.+\]  step   1/150  loss 2\.\d+  right +\d+\.\d%  +\d+ calls/s\x1b\[K", bars[0])
    assert re.fullmatch(r"\[#+\]  step 150/150  loss 0\.\d+  right +(9\d|100)\.\d%  +\d+ calls/s\x1b\[K", bars[-1])
    assert {len(bar.removesuffix("\x1b[K")) for bar in bars} <= set(range(60, 80))
    assert re.fullmatch(r"3000 calls and 150 backward passes through four workers in [\d.]+ s\.", calls)
    assert where == "Where the time of 5 more steps went:"
    assert heading.split() == ["worker", "computing", "encoding", "waiting", "idle", "wall", "cpu", "bubble"]
    assert [line.split()[0] for line in workers] == ["worker0", "worker1", "worker2", "worker3"]
    assert bubble.startswith("bubble: ")
    assert re.fullmatch(r"9\d\.\d% of 360 pictures that it has not seen are classified correctly\.", verdict)


def test_demo_without_a_terminal_ends_quietly_on_ctrl_c() -> None:
    with _demo(stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as demo:
        assert demo.stdout is not None
        lines = [demo.stdout.readline() for _ in range(4)]
        os.killpg(demo.pid, signal.SIGINT)  # as a terminal does, to all of them
        rest = demo.stdout.read()
    assert demo.returncode == 130, rest
    assert lines[0].startswith("Starting four workers"), lines
    assert [line.split("  loss")[0] for line in lines[2:]] == ["step  15/150", "step  30/150"]
    assert "\x1b" not in "".join(lines) + rest
    assert "Traceback" not in rest
    assert rest.endswith("\nStopped.\n")


def _wait_for_end_of_group(group: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError("a process of the demo is still there")


def test_maml_learns_as_in_one_process() -> None:
    first, fifth = _output([*PYTHON, "examples/maml.py", "--steps", "5", "--test-tasks", "1"]).splitlines()
    assert re.fullmatch(r"step   0 +right [\d.]+% after seeing ten pictures", first)
    found = re.fullmatch(r"step   5  loss (\S+)  right [\d.]+% after seeing ten pictures", fifth)
    assert found is not None, fifth
    assert float(found[1]) == pytest.approx(sum(_maml_in_one_process(5)) / 5, abs=1e-6)


def _maml_in_one_process(steps: int) -> list[float]:
    maml = runpy.run_path(str(ROOT / "examples" / "maml.py"))
    layers = maml["layers"]
    tasks, _ = maml["load"]()
    parameters = [*maml["Half"](0).parameters, *maml["Half"](1).parameters]
    optimizer = torch.optim.Adam(parameters, lr=maml["OUTER_RATE"])

    def loss_of(values: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(layers(torch.tanh(layers(x, *values[:4])), *values[4:]), y)

    losses = []
    for _ in range(steps):
        loss = torch.zeros((), dtype=torch.float64)
        for _ in range(maml["TASKS"]):
            x, y, new_x, new_y = tasks.draw()
            adapted = parameters
            for _ in range(maml["INNER_STEPS"]):
                gradients = torch.autograd.grad(loss_of(adapted, x, y), adapted, create_graph=True)
                adapted = [p - maml["INNER_RATE"] * g for p, g in zip(adapted, gradients, strict=True)]
            loss = loss + loss_of(adapted, new_x, new_y) / maml["TASKS"]
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


def test_parameter_server() -> None:
    *progress, total, verdict = _output([*PYTHON, "examples/parameter_server.py", "--steps", "50"]).splitlines()
    lines = [re.fullmatch(r"(worker\d) \| step  (25|50)  after +[\d.]+ s  loss ([\d.]+)", line) for line in progress]
    losses = {(line[1], line[2]): float(line[3]) for line in lines if line is not None}
    assert len(losses) == len(progress) == 6, progress
    assert all(losses[f"worker{n}", "50"] < losses[f"worker{n}", "25"] for n in (1, 2, 3))
    # A step is counted when it begins. That none was lost, tests/optim/test_consistency.py shows.
    counts = re.fullmatch(r"150 steps of 3 trainers; during (\d+) of them another trainer began one\.", total)
    assert counts is not None, total
    assert 0 < int(counts[1]) < 150
    assert re.fullmatch(r"[6-9]\d\.\d% of 360 pictures that nobody has trained on are .*", verdict), verdict


def test_reinforcement_learning() -> None:
    *progress, end = _output([*PYTHON, "examples/reinforcement_learning.py", "--rounds", "8"]).splitlines()
    lines = [re.fullmatch(r"round   (\d)  mean return +([\d.]+)  #*", line) for line in progress]
    returns = {int(line[1]): float(line[2]) for line in lines if line is not None}
    assert list(returns) == [2, 4, 6, 8], progress
    assert returns[8] > 1.4 * returns[2]
    assert end.startswith("The actors took 32768 steps.")


def test_reinforcement_learning_ends_quietly_on_ctrl_c() -> None:
    command = [*PYTHON, "examples/reinforcement_learning.py", "--rounds", "10000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes) as example:
        try:
            assert example.stdout.readline().endswith("\n")  # it trains
            os.killpg(example.pid, signal.SIGINT)
            _, errors = example.communicate(timeout=SECONDS)
        finally:
            if example.poll() is None:
                os.killpg(example.pid, signal.SIGKILL)
    assert example.returncode == 130, errors
    assert "Traceback" not in errors


def test_embeddings() -> None:
    heading, *lines = _output([*PYTHON, "examples/embeddings.py", "--steps", "40"]).splitlines()
    assert re.fullmatch(r"\d+ lines of 9 modules, (1|2)\d% of them of one; 1000 are for the test\.", heading)
    steps = [re.fullmatch(r"step  (\d+)  loss ([\d.]+)  right +([\d.]+)%", line) for line in lines[:2]]
    (first, first_loss, _), (last, last_loss, right) = (line.groups() for line in steps if line is not None)
    assert (first, last) == ("20", "40")
    assert float(last_loss) < float(first_loss)
    assert float(right) > 50
    assert len(lines) == 7
    assert all(re.search(r"  \w+\? (right|no, from \w+)$", line) for line in lines[2:]), lines


def test_pipeline_transformer(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    command = [*PYTHON, "examples/pipeline_transformer.py", "--epochs", "1", "--trace", str(trace)]
    epoch, where, heading, driver, one, two, three, bubble, right = _output(command).splitlines()
    loss = re.fullmatch(r"epoch 1: loss (\d\.\d{3})", epoch)
    assert loss is not None, epoch
    assert float(loss[1]) < 2.25  # that of a guess is 2.30
    assert where == f"Three more steps are in {trace}:"
    assert heading.split()[0] == "worker"
    assert [line.split()[0] for line in (driver, one, two, three)] == ["driver", "worker0", "worker1", "worker2"]
    assert bubble.startswith("bubble: ")
    assert re.fullmatch(r"\d\d\.\d% of 357 pictures that it has not seen are classified correctly\.", right)
    # Each stage runs 8 micro-batches forward and backward in each of the three steps; the picture shows them.
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == "stage"]
    assert len({event["pid"] for event in events}) == 3
    assert len(events) == 3 * 3 * 8 * 2
    picture = tmp_path / "picture.svg"
    _output([*PYTHON, "docs/pipeline_picture.py", str(trace), str(picture)])
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_split_learning_restricted() -> None:
    command = [*PYTHON, "examples/split_learning_restricted.py", "--steps", "30"]
    *steps, shell, hidden, right = _output(command).splitlines()
    assert [line.split("  loss")[0] for line in steps] == ["step  10", "step  20", "step  30"]
    assert shell == "refused: hospital does not expose 'os:system'"
    assert hidden == "refused: hospital does not expose '__mp_main__:open_hospital'"
    assert re.fullmatch(r"9\d\.\d% of 169 patients that were not trained on are diagnosed correctly\.", right)


def test_inference_service() -> None:
    command = [*PYTHON, "examples/inference_service.py", "--requests", "360", "--clients", "16"]
    _, _, *rows, right = _output(command).splitlines()
    clients, sizes = zip(*[(row.split()[0], float(row.split()[-1])) for row in rows], strict=True)
    assert clients == ("1", "4", "16")
    assert sizes[0] == 1
    assert sizes[-1] > 1  # so many requests came while the model was busy
    assert re.fullmatch(r"9\d\.\d% of the answers are right, in batches or not\.", right)


def test_training_survives_a_killed_worker() -> None:
    lines = _output([*PYTHON, "examples/survive_failure.py", "--steps", "20"]).splitlines()
    first, second = lines[1:4], lines[5:9]
    assert lines[4] == "With a worker that is killed:"
    assert second.pop(1) == "step  15  lost worker1. worker2 takes its place."
    assert first == second  # the losses that are shown, and what was learned
    assert lines[9:] == ["The losses of all 20 steps are equal, to the last bit."]


def test_own_process_group() -> None:
    lines = _output([*PYTHON, "examples/own_process_group.py", "--steps", "40"]).splitlines()
    # What a worker prints may come later than what the driver prints after it.
    found = [re.fullmatch(r"torch\.(\w+): ([\d.]+) kB a step, ([\d.]+)% of .*", line) for line in lines]
    (wide, wide_size, wide_right), (narrow, narrow_size, narrow_right) = [match.groups() for match in found if match]
    assert sum(line.startswith("worker0 | step") for line in lines) == len(lines) - 2
    assert (wide, narrow) == ("float32", "bfloat16")
    assert float(narrow_size) == pytest.approx(float(wide_size) / 2, abs=0.1)
    assert min(float(wide_right), float(narrow_right)) > 70  # of 10 digits


def test_notebook(tmp_path: Path) -> None:
    """It runs, and its outputs in the repository are what it prints."""
    pytest.importorskip("nbclient")
    own = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    path = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, **{name: str(tmp_path / name) for name in own}, "PYTHONPATH": path}
    source, result = ROOT / "examples" / "notebook.ipynb", tmp_path / "result.ipynb"
    command = [sys.executable, "-m", "tests.support.run_notebook", str(source), str(result)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    committed, ran = json.loads(source.read_text()), json.loads(result.read_text())
    assert _without_figures(committed) == _without_figures(ran)
    (right,) = re.findall(r"(\d+)% of 360 are right", result.read_text())
    assert int(right) > 85


def _without_figures(book: dict[str, Any]) -> dict[str, Any]:
    """A notebook without what differs between machines: figures, who prints first, and what is drawn."""
    for cell in book["cells"]:
        for output in cell.get("outputs", ()):
            if output["output_type"] == "stream":
                output["text"] = sorted(re.sub(r"\d+\.\d+|\d+%", "#", line) for line in output["text"])
            output.get("data", {}).pop("image/svg+xml", None)
    return book


def _output(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Pieces of Python in the documents


class Block(NamedTuple):
    """A piece of Python in a document."""

    text: str
    where: str

    def program(self, directory: Path) -> str:
        """A program for ``world_size`` workers, which finds ``rank``, ``torch`` and ``rpc`` as after the quick start.

        A piece without ``init_rpc`` is run as the README says: definitions on all workers, the rest on worker0.
        """
        text = self.text.replace(":29500", f":{free_port()}").replace("/tmp/", f"{directory}/")
        if self.needs_gpus:
            text = "import tests.devices.standin\n" + _on_standins(text)
        if "rpc.init_rpc(" in text or self.starts_workers:
            return text
        statements = ast.parse(text).body
        everywhere = [s for s in statements if isinstance(s, _DEFINITIONS)]
        on_worker0 = [s for s in statements if not isinstance(s, _DEFINITIONS)]
        return "\n".join(
            [
                *map(ast.unparse, everywhere),
                f'rpc.init_rpc(f"worker{{rank}}", rank=rank, world_size={self.world_size})',
                "if rank == 0:",
                *(textwrap.indent(ast.unparse(s), "    ") for s in on_worker0),
                "rpc.shutdown()",
            ]
        )

    @property
    def starts_workers(self) -> bool:
        return "farprop.workers(" in self.text

    @property
    def world_size(self) -> int:
        """Two workers, unless the piece names a third, or is a program that starts its own."""
        if self.starts_workers:
            return 1
        return max([1, *map(int, re.findall(r'"worker(\d+)"', self.text))]) + 1

    def promised(self) -> list[str]:
        """What it says that it prints, in comments behind ``print``."""
        text = _on_standins(self.text) if self.needs_gpus else self.text
        return re.findall(r"^ *print\(.*\)  # (.+)$", text, re.MULTILINE)

    @property
    def needs_gpus(self) -> bool:
        return "cuda:" in self.text


def _on_standins(text: str) -> str:
    """The same with the devices of ``tests/devices/standin.py``, which every machine has."""
    return text.replace("cuda:", "lazy:")


_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom


def _blocks(document: str) -> list[Block]:
    text = (ROOT / document).read_text()
    return [
        Block(found[1], f"{document}:{text.count(chr(10), 0, found.start()) + 2}")
        for found in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


DOCUMENTS = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
# It needs Ray: `make clusters` runs it.
NOT_RUN = {"docs/ray.md"}
BLOCKS = [block for document in DOCUMENTS if document not in NOT_RUN for block in _blocks(document)]


def test_every_python_block_is_tested() -> None:
    assert len(_blocks("README.md")) == 1
    for name in DOCUMENTS:
        known = {"python", "sh", "diff", "mermaid", ""}
        fences = re.findall(r"^ *(?:```|~~~)(.*)$", (ROOT / name).read_text(), re.MULTILINE)
        assert set(fences[::2]) <= known, name
        assert set(fences[1::2]) <= {""}, name
        assert fences.count("python") == len(_blocks(name)), name


@pytest.mark.parametrize("block", [pytest.param(block, id=block.where) for block in BLOCKS])
def test_python_in_documents(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(block.program(tmp_path))
    size = block.world_size
    environments = [{"RANK": str(rank), "WORLD_SIZE": str(size)} for rank in range(size)]
    outputs = run_workers(_run_script, size, (str(script),), environments)
    assert outputs[0] == block.promised()
    for output in outputs[1:]:
        assert output in ([], block.promised())


def _run_script(rank: int, path: str) -> list[str]:
    names: dict[str, Any] = {"rank": rank, "torch": torch, "rpc": rpc}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(path, names, "__main__")
    return output.getvalue().splitlines()


def test_received_tensors_cannot_be_resized() -> None:
    assert "received.resize_(3, 3) raises" in COMPAT
    run_workers(_resize)


def _resize(rank: int) -> None:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        with pytest.raises(RuntimeError, match="not resizable"):
            rpc.rpc_sync("worker1", torch.zeros, args=(2, 2)).resize_(3, 3)
    rpc.shutdown()


# The rest of the README

TORCHRUN = "torchrun --standalone --nproc-per-node 2"


def test_first_program(tmp_path: Path) -> None:
    assert "\nfarprop run -n 2 train.py\n" in README
    block = _blocks("README.md")[0]
    script = tmp_path / "train.py"
    script.write_text(block.text)
    lines = _output([sys.executable, "-m", "farprop", "run", "-n", "2", str(script)]).splitlines()
    assert lines == [f"worker0 | {line}" for line in block.promised()]
    assert all(f"`{line}`" in README for line in lines)


def test_torchrun(tmp_path: Path) -> None:
    assert f"\n{TORCHRUN} -m farprop.compat script.py\n" in COMPAT
    block = _blocks("README.md")[0]
    text = block.text.replace("import farprop.rpc as rpc", "import torch.distributed.rpc as rpc")
    text = text.replace("import farprop.autograd as", "import torch.distributed.autograd as")
    text = text.replace("from farprop.", "from torch.distributed.")
    text += '\nassert rpc.__name__ == "farprop.rpc"\nassert RemoteModule.__module__.startswith("farprop.")\n'
    (tmp_path / "script.py").write_text(text)
    torchrun = [sys.executable, "-m", "torch.distributed.run", *TORCHRUN.split()[1:]]
    assert _output([*torchrun, "-m", "farprop.compat", str(tmp_path / "script.py")]).splitlines() == block.promised()


def test_make_commands_exist() -> None:
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = set(re.findall(r"\bmake ([a-z][\w-]*)\b(?=`| +#)", README))
    assert {"demo", "test", "bench", "conformance"} <= commands <= targets


def _anchors(text: str) -> set[str]:
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.+)$", text, re.M)}


@pytest.mark.parametrize("page", [*DOCUMENTS, "SECURITY.md", "CONTRIBUTING.md"])
def test_links_have_a_target(page: str) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text()):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target.read_text()), link


def test_every_setting_is_listed_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(FARPROP_\w+)` \| (.*?) \|", (ROOT / "docs/settings.md").read_text(), re.MULTILINE))
    assert set(rows) == {f"FARPROP_{name.upper()}" for name in Settings.__dataclass_fields__}
    assert rows["FARPROP_TRANSPORT"] == f"`{Settings.transport}`"
    for name in ("max_message_bytes", "shm_pool_bytes", "queue_bytes"):
        assert rows[f"FARPROP_{name.upper()}"] == f"{getattr(Settings, name) >> 30} GiB"
    for name in ("in_flight_bytes", "outbox_bytes"):
        assert rows[f"FARPROP_{name.upper()}"] == f"{getattr(Settings, name) >> 20} MiB"


def test_every_error_is_listed_with_its_base() -> None:
    page = (ROOT / "docs/errors.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+Error)` \|.*\| *((?:`\w+`(?:, )?)*) *\|$", page, re.MULTILINE))
    errors = {n: e for n, e in vars(farprop.errors).items() if isinstance(e, type) and issubclass(e, RuntimeError)}
    assert set(rows) == set(errors)
    for name, listed in rows.items():
        bases = [e.__name__ for e in errors[name].__bases__ if e is not farprop.errors.FarpropError]
        assert bases == re.findall(r"\w+", listed), name
