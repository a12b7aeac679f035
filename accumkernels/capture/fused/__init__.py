"""Weight gradients of linear layers and embeddings that are added to the flat buffer by the op that computes them.

`weights` puts tensors into modules' slots, `functions` has their forward and backward, `gemm` and `rows` add to a
segment. No gradient of the weight exists at any moment. Knows nothing of windows: the caller says before each backward
what gradients are multiplied by, and whether they may be taken at all.
"""
