"""Splits a batch into micro-batches that fit in memory, and learns from each what fits."""
