"""Four workers train one model that is split across them. Run it with ``make demo``, or as ``farprop demo``.

The program is ``src/farprop/launch/demo.py``: it is installed with farprop, so that the command finds it.
"""

import sys

from farprop.launch.demo import main

if __name__ == "__main__":
    sys.exit(main())
