"""Tests of docs/recipes, each in an environment of its own (make test-recipes)."""
