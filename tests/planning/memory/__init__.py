"""Tests of accumkernels.planning.memory."""
