"""What `python -m benchmarks.NAME` runs: command lines, the order of measurements, rows and pictures.

May use methods/ and harness/. Never holds a way to accumulate, or anything that reads a clock by itself.
"""
