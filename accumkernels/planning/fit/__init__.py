"""Finds the largest micro-batch that fits by training on trial, on one rank or on all of them together.

A trial leaves nothing behind: model, optimizer and random state are as before, even after an error.
"""
