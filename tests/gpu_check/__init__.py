"""Tests of tools/gpu_check: stages lose nothing, and say what to do next."""
