"""`python -m benchmarks.autocast`: see commands/autocast.py."""

import sys

from .commands.autocast import main

if __name__ == "__main__":
    sys.exit(main())
