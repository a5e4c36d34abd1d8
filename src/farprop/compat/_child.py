"""The main module of child processes that a program under ``python -m farprop.compat`` starts (see ``__main__``)."""

from farprop.compat import install
from farprop.compat.__main__ import run_again

if __name__ == "__mp_main__":
    install()
    globals().update(run_again())
