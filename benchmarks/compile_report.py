"""`python -m benchmarks.compile_report`: see commands/compile_report.py."""

import sys

from .commands.compile_report import main

if __name__ == "__main__":
    sys.exit(main())
