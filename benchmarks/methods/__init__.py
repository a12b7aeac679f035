"""What is compared: each way to accumulate in its strongest form, whole training loops, and the machine's limits.

May use harness/. Never measures, and never writes a result.
"""
