"""The CUDA sources, compiled for the host and callable from Python: see `build.py` and `ops.py`."""
