"""``python -m farprop.compat script.py ...``: run a program with farprop in place of ``torch.distributed.rpc``."""

import os
import sys

from farprop.compat import _main, install

USAGE = """\
usage: python -m farprop.compat script.py [argument ...]
       python -m farprop.compat -m module [argument ...]

Runs the program with torch.distributed.rpc and torch.distributed.autograd on farprop, in this process and in
those it starts with multiprocessing or torch.multiprocessing. With torchrun, it goes before the script:

       torchrun ... -m farprop.compat script.py [argument ...]"""


def main(arguments: list[str]) -> int:
    """Run the command line; returns the exit code."""
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    as_module = arguments[:1] == ["-m"]
    if as_module:
        del arguments[0]
    if not arguments or arguments[0].startswith("-"):
        print(USAGE, file=sys.stderr)
        return 2
    name, *rest = arguments
    if not as_module and not os.path.isfile(name):
        print(f"farprop.compat: no such script: {name}", file=sys.stderr)
        return 2
    install()
    if as_module:
        _main.run_module(name, rest)
    else:
        _main.run_script(name, rest)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
