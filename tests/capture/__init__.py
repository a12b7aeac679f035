"""Tests of accumkernels.capture."""
