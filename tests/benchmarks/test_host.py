"""python -m benchmarks.host: every set-up beside stock, and loops that train alike."""

import pytest
import torch

from benchmarks.harness.results import read_csv
from benchmarks.host import RELEASES, SETUPS, SetUp, loop, main


@pytest.mark.native
def test_a_row_for_every_set_up(tmp_path, capsys):
    """Stock first, as the ratio's base; in the end two rows for one accumulate."""
    path = tmp_path / "host.csv"
    assert main(["--parameters", "4", "--repetitions", "2", "--csv", str(path)]) == 0
    rows = read_csv(path)
    *rows, accumulate, read = rows
    assert (accumulate["method"], read["method"]) == ("acc.accumulate()", "reading .grad")
    assert len(rows) == len(SETUPS) * (1 + len(RELEASES))
    for first in rows[:: 1 + len(RELEASES)]:
        assert (first["method"], float(first["ratio_to_stock"])) == ("stock", 1.0)
    assert 'release="auto"' in capsys.readouterr().out


@pytest.mark.native
def test_one_accumulate_alone(tmp_path):
    """In seconds, where the windows take minutes."""
    path = tmp_path / "host.csv"
    assert main(["--accumulate", "--parameters", "4,6", "--repetitions", "2", "--csv", str(path)]) == 0
    rows = [(row["parameters"], row["method"]) for row in read_csv(path)]
    assert rows == [(count, method) for count in ("4", "6") for method in ("acc.accumulate()", "reading .grad")]


def test_loops_train_alike():
    """After three windows parameters are those of stock's loop."""
    for release in RELEASES:
        found = []
        for which in (None, release):
            window = loop(4, SetUp(True, False, True), which)
            for _ in range(3):
                window()
            cells = dict(zip(window.__code__.co_freevars, window.__closure__, strict=True))
            optimizer = cells["optimizer"].cell_contents
            found.append([p.detach() for group in optimizer.param_groups for p in group["params"]])
        for ours, stock in zip(found[1], found[0], strict=True):
            torch.testing.assert_close(ours, stock)
