"""Choosing the batch."""
