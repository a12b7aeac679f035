"""Tests of accumkernels.integrations, inside the trainers themselves."""
