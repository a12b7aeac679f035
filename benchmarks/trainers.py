"""`python -m benchmarks.trainers`: see commands/trainers.py."""

import sys

from .commands.trainers import main

if __name__ == "__main__":
    sys.exit(main())
