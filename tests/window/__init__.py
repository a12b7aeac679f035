"""Tests of accumkernels.window."""
