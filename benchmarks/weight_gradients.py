"""`python -m benchmarks.weight_gradients`: see commands/weight_gradients.py."""

import sys

from .commands.weight_gradients import main

if __name__ == "__main__":
    sys.exit(main())
