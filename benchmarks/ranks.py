"""`python -m benchmarks.ranks`: see commands/ranks.py."""

import sys

from .commands.ranks import main

if __name__ == "__main__":
    sys.exit(main())
