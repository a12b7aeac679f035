"""What accumkernels costs and saves, measured against its peers: `python -m benchmarks` lists the commands.

NAME.py is `python -m benchmarks.NAME`; kernel_jobs.py and kernel_rows.py are parts of kernels.py. `methods/` is what is
compared; `harness/` times and writes results, and knows neither.
"""
