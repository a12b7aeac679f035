"""Without an accelerator the example with state in host memory says what would fit; it trains in simulated_device/."""

import re

from tests.examples.test_planning import load


def test_predictions(capsys):
    """The card of the second report has neither sums nor state, and the host's bytes are those of the page."""
    example = load("one_card")
    example.main(["--layers", "2", "--width", "64", "--tokens", "32"])
    without, offloaded = capsys.readouterr().out.split("cpu_offload=True")
    assert "host memory" not in without
    assert re.search(r"^accumulators +0 .*\noptimizer +0 ", offloaded, re.MULTILINE)
    assert re.search(r"^host memory +[\d,]+ ", offloaded, re.MULTILINE)
    assert "--simulated trains on one in memory" in offloaded
