"""The policy of a window of micro-batches: how gradients are weighted, checked, averaged and assigned.

This room holds the window's state and alone decides on it or writes it. It calls capture/, ranks/ and buffers/ with
values; none of them calls back. It never touches autograd hooks or collectives itself.
"""
