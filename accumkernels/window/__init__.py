"""The policy of a window of micro-batches: how gradients are weighted, judged, averaged and handed out.

Holds the window's state, and is the only room that judges or writes it. It calls capture/, ranks/ and buffers/ and
gives them values; none of them calls back. It never touches autograd hooks or collectives itself.
"""
