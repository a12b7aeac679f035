"""Tests of setup.py, the wheel and the library in it."""
