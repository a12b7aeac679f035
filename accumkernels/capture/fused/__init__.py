"""Ops that compute weight gradients of linear layers and embeddings and add them to the flat buffer at once.

`weights` puts tensors into modules' slots, `functions` has their forward and backward, `gemm` and `rows` add to a
segment. The weight's gradient never exists as a tensor. This room knows nothing of windows: the caller says before each
backward what to multiply gradients by, and whether to take them at all.
"""
