"""`python -m benchmarks.host`: see commands/host.py."""

import sys

from .commands.host import main

if __name__ == "__main__":
    sys.exit(main())
