"""The CUDA kernels in a program without torch or Python: see `main.cpp` and the Makefile here."""
