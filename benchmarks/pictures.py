"""`python -m benchmarks.pictures`: see commands/pictures.py."""

import sys

from .commands.pictures import main

if __name__ == "__main__":
    sys.exit(main())
