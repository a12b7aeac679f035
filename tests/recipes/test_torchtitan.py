"""docs/recipes/torchtitan.md: its Trainer and loop on two ranks against one process, beside torchtitan's own."""

from __future__ import annotations

import pytest

pytest.importorskip("torchtitan")

from tests.support import ranks, torchtitan_scenarios  # noqa: E402
from tests.support.models import relative_error  # noqa: E402
from tests.support.recipes import check, classifier  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.starts, pytest.mark.usefixtures("one_thread")]


def test_two_ranks(tmp_path):
    """Unequal numbers of tokens on the ranks and in micro-batches, with and without clipping."""
    name = torchtitan_scenarios.trains_as_one_process.__name__
    found = ranks.run(2, tmp_path, [torchtitan_scenarios.trains_as_one_process])
    ranks.check(found, name)
    start = [p.detach().double() for p in classifier().parameters()]
    for (who, max_norm), parameters in found[name][0].items():
        expected = torchtitan_scenarios.truth(2, max_norm).parameters()
        ways = [[p.detach() - s for p, s in zip(each, start, strict=True)] for each in (parameters, expected)]
        off = relative_error(*ways)
        print(who, max_norm)
        check("torchtitan", off)
