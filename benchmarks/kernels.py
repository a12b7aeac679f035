"""`python -m benchmarks.kernels`: see commands/kernels.py."""

import sys

from .commands.kernels import main

if __name__ == "__main__":
    sys.exit(main())
