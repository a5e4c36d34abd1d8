"""Runs the cells of a notebook in a kernel: reads each from its input and writes the outcome, as lines of JSON.

It is a process of its own because Jupyter's client leaves sockets and event loops to the garbage collector.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

import jupyter_client
import nbclient
import nbformat


def main() -> None:
    book = nbformat.v4.new_notebook()
    sockets = tempfile.TemporaryDirectory()
    # A kernel leaves its sockets behind.
    manager = jupyter_client.AsyncKernelManager(
        kernel_name="python3", transport="ipc", ip=os.path.join(sockets.name, "kernel")
    )
    client = nbclient.NotebookClient(book, km=manager, timeout=100)
    with sockets, client.setup_kernel():
        _answer({"pid": manager.provisioner.pid})
        for line in sys.stdin:
            cell = nbformat.v4.new_code_cell(json.loads(line))
            book.cells.append(cell)
            error = ""
            try:
                client.execute_cell(cell, len(book.cells) - 1)
            except nbclient.exceptions.CellExecutionError as raised:
                error = raised.ename
            text = "".join(output.text for output in cell.outputs if output.output_type == "stream")
            _answer({"text": text, "error": error})


def _answer(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
