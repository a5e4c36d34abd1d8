"""The main module of child processes that a program under ``python -m farprop.compat`` starts (see ``_main``)."""

from farprop.compat import _main, install

if __name__ == "__mp_main__":
    install()
    globals().update(_main.run_again())
