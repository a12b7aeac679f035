"""`python -m benchmarks.link`: see commands/link.py."""

import sys

from .commands.link import main

if __name__ == "__main__":
    sys.exit(main())
