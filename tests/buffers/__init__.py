"""Tests of accumkernels.buffers."""
