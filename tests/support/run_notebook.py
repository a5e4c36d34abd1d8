"""``python -m tests.support.run_notebook NOTEBOOK [RESULT]`` runs a notebook, and writes it with its outputs.

Nothing is written that differs from run to run: no times, no state of the kernel. Without RESULT the outputs are those
of NOTEBOOK from then on. It is a process of its own because Jupyter's client leaves sockets and event loops to the
garbage collector.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import jupyter_client
import nbclient
import nbformat


def run(book: nbformat.NotebookNode, directory: str) -> None:
    """Run all cells, with ``directory`` as the kernel's, and put the outputs into them."""
    metadata = dict(book.metadata)
    with tempfile.TemporaryDirectory() as sockets:  # a kernel leaves its own behind
        manager = jupyter_client.AsyncKernelManager(
            kernel_name="python3", transport="ipc", ip=os.path.join(sockets, "kernel")
        )
        client = nbclient.NotebookClient(
            book, km=manager, timeout=100, record_timing=False, resources={"metadata": {"path": directory}}
        )
        client.execute()
    book.metadata.clear()
    book.metadata.update(metadata)
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)


def _joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """The outputs, with the pieces of a stream put together: when they were sent differs from run to run."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and joined and joined[-1].get("name") == output.name:
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def main() -> None:
    source, *result = sys.argv[1:]
    book = nbformat.read(source, as_version=4)
    run(book, str(Path(source).parent))
    nbformat.write(book, result[0] if result else source)


if __name__ == "__main__":
    main()
