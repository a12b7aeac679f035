"""Tests of accumkernels.planning.fit."""
