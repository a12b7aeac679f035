"""Tests of accumkernels.doctor."""
