"""Runs of trainers on ranks that fail, have windows without micro-batches, are launched otherwise, or are resumed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from tests.support.ranks import check, run

pytest.importorskip("accelerate")
pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

from tests.support import trainer_run_scenarios as scenarios  # noqa: E402
from tests.support.trainer_data import LR, STEPS, items  # noqa: E402
from tests.support.trainer_truth import ROUNDING, SHARDED_ROUNDING, assert_close, truth  # noqa: E402
from tests.support.trainers import MODULES  # noqa: E402

pytestmark = [
    pytest.mark.starts,
    pytest.mark.integrations,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two ranks found, and what one process had saved for them, or has made of what they saved."""
    folder = tmp_path_factory.mktemp("runs")
    first, second = items(2)
    scenarios.accelerate_run(folder / "of-one", first)
    names = [scenarios.accelerate_without_micro_batches, scenarios.lightning_drops, scenarios.accelerate_resumed]
    results = run(2, folder, [*names, *scenarios.SAVED, *scenarios.RESUMED], MODULES)
    check(results, "accelerate_resumed")
    on_one = scenarios.accelerate_run(None, second, seed=1, load=folder / "of-two")
    return {**results, "on one": on_one, "folder": folder}


@pytest.mark.parametrize("trainer", ["accelerate", "lightning", "transformers"])
def test_an_exception_on_one_rank(trainer, tmp_path):
    """It ends the run there, and on the other rank the error of a collective does, before the group's timeout."""
    name = f"{trainer}_raises"
    waits, raises = run(2, tmp_path, [getattr(scenarios, name)])[name]
    assert "LookupError: a batch of this rank is bad" in raises
    assert "LookupError" not in waits
    assert re.search(r"(RuntimeError|Dist\w+Error): .*(closed|reset|refused)", waits)


def test_windows_without_micro_batches(found):
    """One rank's is the others' window; where no rank has any, nothing moves and the schedule goes on, as in stock."""
    check(found, "accelerate_without_micro_batches")
    windows = [list(range(2 * STEPS)), list(range(2 * STEPS, 4 * STEPS, 2))]
    rates = [LR * 0.9**2, LR * 0.9**4, LR * 0.9**6]  # accelerate's schedules take a step for each process
    for left in found["accelerate_without_micro_batches"]:
        assert left.rates == pytest.approx(rates)
        assert left.skipped == [False] * 3
        expected, _ = truth(2, windows=windows, momentum=scenarios.MOMENTUM, rates=[LR, rates[0]])
        assert_close(left.values, expected, ROUNDING["fp32"])


def test_dropped_windows(found):
    """All ranks drop what Lightning would, also where sums were on their way."""
    check(found, "lightning_drops")
    for left in found["lightning_drops"]:
        for stock, ours in left.values():
            for name in stock:
                torch.testing.assert_close(stock[name], ours[name], rtol=1e-5, atol=1e-7)


def test_the_notebook_launcher(tmp_path):
    """Two processes on the CPU, forked from one."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "tests.support.notebook_run", str(tmp_path / "parameters")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    expected, _ = truth(2, windows=items(2)[:1])
    assert_close(torch.load(tmp_path / "parameters"), expected, ROUNDING["fp32"])


def test_resumed_on_another_number_of_ranks(found):
    """accelerate's `save_state` and `load_state` between windows: one process goes on from two ranks, two from one."""
    expected, _ = truth(2, momentum=scenarios.MOMENTUM)
    for values in (*found["accelerate_resumed"], found["on one"]):
        assert_close(values, expected, ROUNDING["fp32"])


@pytest.fixture(scope="module", params=[1, 2, 4])
def resumed(request, found):
    """What so many ranks made of the sharded checkpoints of two."""
    for scenario in scenarios.SAVED:
        check(found, scenario.__name__)
    return found if request.param == 2 else run(request.param, found["folder"], scenarios.RESUMED, MODULES)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("trainer", ["accelerate", "lightning", "transformers"])
def test_sharded_runs_are_resumed(resumed, trainer, precision):
    """By each trainer's own way, the optimizer's and the scaler's state with them; on other numbers of ranks, too."""
    name = f"{trainer}_fsdp2_resumed"
    check(resumed, name)
    numbers = items(scenarios.SAVED_BY, uneven=False)
    windows = [numbers[0]] * 2 if trainer == "lightning" else numbers
    expected, _ = truth(scenarios.SAVED_BY, windows=windows, momentum=scenarios.MOMENTUM)
    for values in resumed[name]:
        assert_close(values[precision], expected, SHARDED_ROUNDING[precision])
