"""The search for the largest size that fits."""

from __future__ import annotations

from collections.abc import Callable


def largest_that_fits(fits: Callable[[int], bool], start: int, cap: int, step: int, mode: str) -> int | None:
    """Double from `start` until a size does not fit or exceeds `cap`; with "binsearch", close in on the limit.

    Args:
        fits: Tries a size; it is called at most once per size.
        start: The first size; a multiple of `step`, at most `cap`.
        cap: The largest size to try.
        step: "binsearch" tries multiples of it only.
        mode: "power" or "binsearch".

    Returns:
        The largest size that was tried and fitted, or None. With "power" it is the largest `start * 2**k`, with
        "binsearch" the largest multiple of `step`, provided that everything fits up to some limit.
    """
    top = cap // step * step
    good, bad = 0, top + step  # multiples of step; what lies at or above bad is not to be tried
    size = start
    while size <= top:
        if not fits(size):
            bad = size
            break
        good, size = size, 2 * size
    if mode == "binsearch" and good < top < bad:  # nothing failed: the cap may well fit
        if fits(top):
            good = top
        else:
            bad = top
    while mode == "binsearch" and good and bad - good > step:
        middle = (good + bad) // (2 * step) * step
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good or None
