"""The tests, in the rooms of the package: tests/window/test_end.py is for accumkernels/window/end.py."""
