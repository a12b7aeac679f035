"""Tests of accumkernels.demo."""
