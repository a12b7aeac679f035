"""What it is worth: the micro-batches that reach a batch, whether to accumulate at all, and the learning rate.

It computes from what was measured, and runs no training.
"""
