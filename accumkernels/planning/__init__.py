"""Choosing the batch: what fits, how to reach a target, whether that is worth it.

It trains models on trial and restores them. It stands above the accumulator, which knows nothing of it.
"""
