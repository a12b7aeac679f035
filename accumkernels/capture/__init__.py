"""Takes gradients from autograd: after backward, while it runs, or before autocast widens them.

This room may read and clear `.grad`, put hooks on parameters and modules, and look up segments in buffers/. It knows
nothing of weights, windows, ranks or overflow, and never decides whether a gradient is used.
"""
