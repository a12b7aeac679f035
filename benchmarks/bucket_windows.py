"""`python -m benchmarks.bucket_windows`: see commands/bucket_windows.py."""

import sys

from .commands.bucket_windows import main

if __name__ == "__main__":
    sys.exit(main())
