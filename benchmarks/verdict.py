"""`python -m benchmarks.verdict`: see commands/verdict.py."""

import sys

from .commands.verdict import main

if __name__ == "__main__":
    sys.exit(main())
