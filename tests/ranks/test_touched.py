"""Which segments any rank has touched: right in any sequence of windows, with one collective once they repeat."""

from __future__ import annotations

import random

from accumkernels.ranks.sender import Touched

PARAMETERS = 6


class Ranks:
    """Ranks that end windows; counts collectives."""

    def __init__(self, size):
        self.all = [Touched(PARAMETERS, size) for _ in range(size)]
        self.numbers = []  # by collective

    def end(self, windows, idle=None):
        """What each rank concludes of a window in which ranks have touched these segments; with `idle`, see `both`."""
        found = self.both(windows, [b""] * len(windows) if idle is None else idle)
        return [touched for touched, _ in found] if idle is None else found

    def both(self, windows, idle):
        """What was touched, and what is given back."""
        triples = list(zip(self.all, windows, idle, strict=True))
        sums = self._sum([t.fields(own, gone) for t, own, gone in triples])
        counted = [t._counted(own, gone) for t, own, gone in triples]
        asked = []

        def ask(fields):
            asked.append(fields)
            return {name: [sum(n) for n in zip(*(f[name] for f in counted), strict=True)] for name in fields}

        found = [t.combine(own, gone, sums, ask) for t, own, gone in triples]
        assert len(asked) in (0, len(windows))  # all ranks, or none
        if asked:
            self.numbers.append(PARAMETERS)
        return found

    def _sum(self, fields):
        lists = [{n: v if isinstance(v, list) else [v] for n, v in f.items()} for f in fields]
        assert len({tuple((n, len(v)) for n, v in f.items()) for f in lists}) == 1
        self.numbers.append(sum(map(len, lists[0].values())))
        return {name: [sum(n) for n in zip(*(f[name] for f in lists), strict=True)] for name in lists[0]}


def union(windows):
    """By the definition."""
    return bytes(max(column) for column in zip(*windows, strict=True))


def test_any_sequence_of_windows():
    """Ranks that touch the same as ever, nothing, or anything, in turns that last for some windows."""
    chosen = random.Random(0)
    for size in (1, 2, 5):
        ranks = Ranks(size)
        owns = [bytes(PARAMETERS)] * size
        for _ in range(600):
            for rank in range(size):
                if chosen.random() < 0.2:
                    owns[rank] = bytes(chosen.randrange(2) for _ in range(PARAMETERS))
                    kind = chosen.random()
                    if kind < 0.6:
                        owns[rank] = bytes([kind < 0.4] * PARAMETERS)
            assert ranks.end(owns) == [union(owns)] * size


def test_a_settled_layout_sends_three_numbers():
    """Also with an empty rank in some windows, and where ranks touch different parts."""
    whole, nothing, part, rest = b"\1" * 6, bytes(6), b"\1\1\0\0\0\0", b"\0\0\1\1\1\1"
    ranks = Ranks(3)
    for _ in range(4):
        ranks.end([whole] * 3)
    for empty in ([whole, nothing, whole], [nothing, nothing, whole], [whole] * 3):
        assert ranks.end(empty) == [whole] * 3
    assert ranks.numbers == [6, 6] + [3] * 5
    ranks = Ranks(2)
    for _ in range(5):
        assert ranks.end([part, rest]) == [whole] * 2
    assert ranks.numbers == [6, 6, 3, 3, 3]


def test_a_change_is_asked_for_once():
    """Then counts go with the vector until nothing changes: never more than one collective after the first."""
    whole, part = b"\1" * 6, b"\1\1\0\0\0\0"
    ranks = Ranks(2)
    for owns in ([whole] * 2,) * 3 + ([part] * 2,) + ([whole] * 2, [part] * 2) * 2 + ([part] * 2,) * 2:
        assert ranks.end(owns) == [union(owns)] * 2
    assert ranks.numbers == [6, 6, 3, 3, 6, 6, 6, 6, 6, 6, 3]


def test_growth_is_beyond_what_was_touched():
    """A segment that is new changes the layout, whether it was touched or not."""
    ranks = Ranks(2)
    for _ in range(3):
        ranks.end([b"\1\1\1\1"] * 2)
    assert ranks.end([b"\1\1\1\1\0\0"] * 2) == [b"\1\1\1\1\0\0"] * 2
    assert ranks.numbers == [6, 6, 3, 3, 6]


def test_what_is_given_back():
    """What all ranks could give back, in the window in which they no longer touch it, and in no other collective."""
    whole, part, idle = b"\1" * 6, b"\1\1\0\0\0\0", b"\0\0\1\1\1\1"
    some, none = b"\0\0\0\0\1\1", bytes(6)
    for size in (1, 2, 3, 1000):
        ranks = Ranks(size)
        for _ in range(3):
            ranks.end([whole] * size)
        before = len(ranks.numbers)
        assert ranks.end([part] * size, [idle] * size) == [(part, idle)] * size
        assert len(ranks.numbers) == before + 2
        assert ranks.end([none] * size, [idle, *[some] * (size - 1)])[0] == (none, some if size > 1 else idle)
        if size > 1:
            assert ranks.end([part] * size, [b"", *[idle] * (size - 1)])[0] == (part, none)
            assert ranks.end([whole, *[part] * (size - 1)], [b"", *[idle] * (size - 1)])[0] == (whole, none)


def test_another_layout_is_counted():
    """Whatever was touched in the last one."""
    ranks = Ranks(2)
    for _ in range(3):
        ranks.end([b"\1\1"] * 2)
    for rank in ranks.all:
        rank.follow()
    ranks.end([b"\1\1"] * 2)
    assert ranks.numbers == [6, 6, 3, 6]
