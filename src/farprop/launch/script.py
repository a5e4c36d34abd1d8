"""The entry point of a worker under ``farprop run``: ``python -m farprop.launch.script [-m] program [argument ...]``.

It runs the program as ``python`` would, with two differences. An exception that ends it goes to the file that torch's
elastic agent has given for it, so that the launcher can show the first one, once. And the process ends with its
launcher, also if that is killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from types import TracebackType

from farprop import program

LAUNCHER = "FARPROP_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1
_OWN_FILES = {__file__, program.__file__, "<frozen runpy>"}


def main(arguments: list[str]) -> None:
    """Run the program."""
    _end_with_launcher()
    sys.excepthook = _report
    as_module = arguments[0] == "-m"
    if as_module:
        del arguments[0]
    name, *rest = arguments
    try:
        if as_module:
            code, spec = program.load_module(name, rest)
            program.run_as_main(code, sys.argv[0], spec.parent, spec)
        else:
            program.run_as_main(program.load_script(name, rest), name, None, None)
    except SystemExit as error:
        if error.code not in (None, 0):
            # Said now: the launcher may end this process, because another failed, before it has come to its end.
            with suppress(OSError, KeyError):
                _write(os.environ["TORCHELASTIC_ERROR_FILE"], error, "")
        raise


def _end_with_launcher() -> None:
    launcher = int(os.environ[LAUNCHER])
    with suppress(OSError, AttributeError):  # no such call: then it lives on if the launcher is killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:
        os._exit(1)  # it ended before this process asked to be told


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Instead of ``sys.excepthook``. While the job may be started again, the traceback is shown at once."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN_FILES:
        trace = trace.tb_next
    error.__traceback__ = trace
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") != os.environ.get("TORCHELASTIC_MAX_RESTARTS"):
        if _is_consequence(error):
            print(_summary(error), file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, trace)
    try:
        _write(os.environ["TORCHELASTIC_ERROR_FILE"], error, "".join(traceback.format_exception(error)))
    except (OSError, KeyError):  # a full disk must not hide it
        sys.__excepthook__(kind, error, trace)


def _write(path: str, error: BaseException, text: str) -> None:
    now = time.time()
    content = {
        "message": {
            "message": _summary(error),
            "extraInfo": {"py_callstack": text, "timestamp": str(int(now))},
        },
        "farprop": {"time": now, "is_consequence": _is_consequence(error)},
    }
    with open(path, "w") as file:
        json.dump(content, file)


def _summary(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r})"
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    text = ""
    with suppress(Exception):  # ``__str__`` of an exception is the program's
        text = str(error)
    return f"{name}: {text}" if text else name


def _is_consequence(error: BaseException) -> bool:
    """Whether the exception came of the failure of another worker."""
    if "farprop.errors" not in sys.modules:
        return False
    from farprop.protocol.first_failure import blamed

    return isinstance(error, KeyboardInterrupt) or blamed(error) is not None


if __name__ == "__main__":
    main(sys.argv[1:])
