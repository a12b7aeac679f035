"""`python -m benchmarks.memory`: see commands/memory.py."""

import sys

from .commands.memory import main

if __name__ == "__main__":
    sys.exit(main())
