"""Computes the micro-batches that reach a batch, whether accumulating is worth it, and the learning rate.

It computes from measurements, and runs no training.
"""
