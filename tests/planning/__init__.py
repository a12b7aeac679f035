"""Tests of accumkernels.planning."""
