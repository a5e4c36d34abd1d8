"""``python -m farprop``: the command ``farprop``."""

import sys

from farprop.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
