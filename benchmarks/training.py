"""`python -m benchmarks.training`: see commands/training.py."""

import sys

from .commands.training import main

if __name__ == "__main__":
    sys.exit(main())
