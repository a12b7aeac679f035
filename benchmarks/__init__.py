"""What accumkernels costs and saves, measured against its peers: `python -m benchmarks.NAME`.

`commands/` measures and prints, `methods/` is what is compared, `harness/` times and writes results and knows neither.
"""
