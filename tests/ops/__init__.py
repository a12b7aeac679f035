"""Tests of accumkernels.ops, every backend against plain torch."""
