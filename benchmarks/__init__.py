"""Benchmarks: one module per question, results as CSV in `results/`. `python -m benchmarks.<module> --help`."""
