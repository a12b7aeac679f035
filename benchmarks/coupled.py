"""`python -m benchmarks.coupled`: see commands/coupled.py."""

import sys

from .commands.coupled import main

if __name__ == "__main__":
    sys.exit(main())
