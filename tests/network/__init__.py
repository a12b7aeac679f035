"""Tests that install from the package index: each has a target in the Makefile."""
