"""`python -m benchmarks.buckets`: see commands/buckets.py."""

import sys

from .commands.buckets import main

if __name__ == "__main__":
    sys.exit(main())
