"""Attacks on the trainers' adapters on two ranks, held to one process on all the data: docs/data_parallel.md.

What other tests attack, with their names, is in that page's table too.
"""

from __future__ import annotations

import functools
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from tests.support.ranks import check, run

pytest.importorskip("accelerate")
pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

from tests.support import (  # noqa: E402
    accelerate_attack_scenarios,
    lightning_attack_scenarios,
    transformers_attack_scenarios,
)
from tests.support.models import mlp  # noqa: E402
from tests.support.trainer_data import MAX_VALUE, STEPS, Heads, items  # noqa: E402
from tests.support.trainer_truth import ROUNDING, assert_close, truth  # noqa: E402

pytestmark = [
    pytest.mark.starts,
    pytest.mark.integrations,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]

SIZE = 2
UNEVEN, EVEN = items(SIZE), items(SIZE, uneven=False)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two ranks found, in one start, and what one process has made of what they saved."""
    folder = tmp_path_factory.mktemp("attacks")
    scenarios = [
        accelerate_attack_scenarios.accelerate_attacks,
        accelerate_attack_scenarios.accelerate_saved_inside,
        accelerate_attack_scenarios.accelerate_resumed_inside,
        lightning_attack_scenarios.lightning_attacks,
        lightning_attack_scenarios.lightning_saved_inside,
        lightning_attack_scenarios.lightning_resumed_inside,
        transformers_attack_scenarios.transformers_attacks,
        transformers_attack_scenarios.transformers_stops,
    ]
    return {**run(SIZE, folder, scenarios), "folder": folder}


def without(windows, *numbers):
    """Windows in which some micro-batches of the last rank, by their number on that rank, are left out."""
    left_out = {number * SIZE + SIZE - 1 for number in numbers}
    return [[i for i in window if i not in left_out] for window in windows]


def clamped(grad):
    """By value."""
    return grad.clamp(-MAX_VALUE, MAX_VALUE)


def doubled(grad):
    """By a callback."""
    return 2 * grad


# What one process is to make of it, where that is not to train on all the data as it is.
EXPECTED = {
    "clipped by value": {"change": clamped},
    "clipped by value, sharded": {"change": clamped},
    "gradients changed": {"change": doubled},
    "gradients changed, sharded": {"change": doubled},
    "gradients replaced": {"change": doubled},
    "unused": {"make": Heads},
    "unused, not said": {"make": Heads},
}
CASES = {
    "accelerate": {
        **dict.fromkeys(accelerate_attack_scenarios.EXACT, {}),
        "a step fails": {"windows": without(UNEVEN, 1)},
        "steps changed": {"windows": [list(range(5 * SIZE)), list(range(5 * SIZE, 6 * SIZE))]},
    },
    "lightning": {
        **dict.fromkeys(lightning_attack_scenarios.EXACT, {}),
        "a step fails": {"windows": without(EVEN, 1, STEPS - 1)},
        "steps changed": {
            "windows": [*EVEN, *(list(range(start, start + 2 * SIZE)) for start in range(0, 6 * SIZE, 2 * SIZE))]
        },
        "early stopping": {"windows": [*EVEN, *EVEN]},
    },
    "transformers": {
        **dict.fromkeys(transformers_attack_scenarios.EXACT, {}),
        "a step fails": {"windows": without(UNEVEN, 1, STEPS - 1)},
    },
}


@functools.cache
def expected(trainer, attack):
    """Parameters of one process."""
    even = trainer == "lightning" or attack.endswith("sharded")
    return truth(SIZE, **{"windows": EVEN if even else UNEVEN, **EXPECTED.get(attack, {}), **CASES[trainer][attack]})[0]


@pytest.mark.parametrize(("trainer", "attack"), [(trainer, attack) for trainer in CASES for attack in CASES[trainer]])
def test_exact(found, trainer, attack):
    """On both ranks."""
    name = f"{trainer}_attacks"
    check(found, name)
    make = EXPECTED.get(attack, {}).get("make", mlp)
    for result in found[name]:
        values = {key.removeprefix("_orig_mod.").removeprefix("net."): value for key, value in result[attack].items()}
        assert_close(values, expected(trainer, attack), ROUNDING["fp32"], make)


@pytest.mark.parametrize(
    ("trainer", "attack", "text"),
    [
        ("accelerate", "clipped by value, sharded", "Use `clip_grad_norm_` instead"),
        ("lightning", "a step without loss", "returning None in distributed training is not supported"),
        ("transformers", "unequal windows", "rank 1 would end after 1 windows, and rank 0 after 2"),
    ],
)
def test_refused(found, trainer, attack, text):
    """On both ranks, by an error that says what to do; the first two are the trainers' own."""
    name = f"{trainer}_attacks"
    check(found, name)
    for result in found[name]:
        assert text in result[attack][1]


@pytest.mark.parametrize("trainer", ["accelerate", "lightning"])
def test_saved_inside_a_window(found, trainer):
    """By the trainer's own checkpoint; two ranks end the window. In Lightning, one had no micro-batch in it so far."""
    name = f"{trainer}_resumed_inside"
    check(found, f"{trainer}_saved_inside")
    check(found, name)
    windows = EVEN[:1] if trainer == "accelerate" else without(EVEN, 0, 1)
    for values in found[name]:
        assert_close(values, truth(SIZE, windows=windows)[0], ROUNDING["fp32"])


def test_saved_inside_a_window_and_resumed_on_one_rank(found):
    """One process ends the window of two."""
    check(found, "accelerate_saved_inside")
    folder = found["folder"] / "inside-a-window"
    values = accelerate_attack_scenarios.rest_of_a_window(folder, EVEN[0][2 * SIZE :])
    assert_close(values, truth(SIZE, windows=EVEN[:1])[0], ROUNDING["fp32"])


def test_a_rank_that_stops(found):
    """By a callback, in transformers: it is said which, and after how many windows."""
    check(found, "transformers_stops")
    texts = [text for _, text in found["transformers_stops"]]
    assert any("rank 1 ended its training after 1 windows, while another rank waited" in text for text in texts)
