"""Tests of accumkernels.ranks, on several gloo ranks."""
