"""Tests of examples/, which run them."""
