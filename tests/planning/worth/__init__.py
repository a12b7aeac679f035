"""Tests of accumkernels.planning.worth."""
