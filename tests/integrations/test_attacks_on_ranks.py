"""Attacks on the trainers' adapters on 2 and 4 ranks, held to one process on all the data: docs/data_parallel.md.

What other tests attack, with their names, is in that page's table too. What is slow, compiled models, runs on 2 alone.
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
    one_rank_attack_scenarios,
    sharded_attack_scenarios,
    transformers_attack_scenarios,
    transformers_saving_scenarios,
)
from tests.support.models import mlp  # noqa: E402
from tests.support.sharded_attack_scenarios import LEFT_OUT, TO_STEPS, Turns  # noqa: E402
from tests.support.trainer_data import MAX_NORM, MAX_VALUE, STEPS, Heads, items  # noqa: E402
from tests.support.trainer_truth import ROUNDING, SHARDED_ROUNDING, assert_close, truth  # noqa: E402
from tests.support.trainers import MODULES  # noqa: E402

pytestmark = [
    pytest.mark.starts,
    pytest.mark.integrations,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]

SIZES = (2, 4)
TRAINERS = ("accelerate", "lightning", "transformers")
SCENARIOS = [
    accelerate_attack_scenarios.accelerate_attacks,
    accelerate_attack_scenarios.accelerate_saved_inside,
    accelerate_attack_scenarios.accelerate_resumed_inside,
    lightning_attack_scenarios.lightning_attacks,
    lightning_attack_scenarios.lightning_saved_inside,
    lightning_attack_scenarios.lightning_resumed_inside,
    transformers_attack_scenarios.transformers_attacks,
    transformers_saving_scenarios.transformers_saved_inside,
    transformers_saving_scenarios.transformers_resumed_inside,
    transformers_saving_scenarios.transformers_epoch_stopped,
    *(getattr(sharded_attack_scenarios, f"{trainer}_sharded_attacks") for trainer in TRAINERS),
    *(getattr(one_rank_attack_scenarios, f"{trainer}_one_rank") for trainer in TRAINERS),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What four ranks found, then two that share their folder, each in one start; and that folder."""
    folder = tmp_path_factory.mktemp("attacks")
    last = transformers_attack_scenarios.transformers_stops
    four = run(4, folder, [*SCENARIOS, last], MODULES)
    two = run(2, folder, [*SCENARIOS, accelerate_attack_scenarios.accelerate_resumed_from_four, last], MODULES)
    return {2: two, 4: four, "folder": folder}


def without(windows, size, *numbers):
    """Windows in which some micro-batches of the last rank, by their number on that rank, are left out."""
    left_out = {number * size + size - 1 for number in numbers}
    return [[i for i in window if i not in left_out] for window in windows]


def regrouped(size, *steps):
    """Windows of so many micro-batches of each rank."""
    numbers = iter(range(size * sum(steps)))
    return [[next(numbers) for _ in range(size * n)] for n in steps]


def clamped(grad):
    """By value."""
    return grad.clamp(-MAX_VALUE, MAX_VALUE)


def doubled(grad):
    """By a callback."""
    return 2 * grad


# What one process is to make of an attack, by its name and the number of ranks; of the others, all the data as it is.
EVEN = {size: items(size, uneven=False) for size in SIZES}
UNEVEN = {size: items(size) for size in SIZES}
OF_ATTACKS = {
    "clipped by value": lambda size: {"change": clamped},
    "gradients changed": lambda size: {"change": doubled},
    "gradients replaced": lambda size: {"change": doubled},
    "unused": lambda size: {"make": Heads},
    "unused, not said": lambda size: {"make": Heads},
}
OF_TRAINERS = {
    "accelerate": {
        "a step fails": lambda size: {"windows": without(UNEVEN[size], size, 1)},
        "steps changed": lambda size: {"windows": regrouped(size, STEPS + 1, 1)},
    },
    "lightning": {
        "a step fails": lambda size: {"windows": without(EVEN[size], size, 1, STEPS - 1)},
        "steps changed": lambda size: {"windows": [*EVEN[size], *regrouped(size, 2, 2, 2)]},
        "early stopping": lambda size: {"windows": [*EVEN[size], *EVEN[size]]},
    },
    "transformers": {
        "a step fails": lambda size: {"windows": without(UNEVEN[size], size, 1, STEPS - 1)},
    },
}
SHARDED = {
    "clipped by value": lambda size: {"change": clamped},
    "left out": lambda size: {"windows": without(EVEN[size], size, LEFT_OUT)},
    "steps changed": lambda size: {"windows": regrouped(size, TO_STEPS, STEPS + 2 - TO_STEPS)},
    "unused in turns": lambda size: {"make": functools.partial(Turns, size)},
    "overflow and clipping": lambda size: {"skipped": {0}, "clip": MAX_NORM},
}
BY_ONE_RANK = {
    "fails in the last backward": lambda size: {"windows": without(UNEVEN[size], size, STEPS - 1), "clip": MAX_NORM},
    "fails before the last backward": lambda size: BY_ONE_RANK["fails in the last backward"](size),
    "overflows in the last backward": lambda size: {"skipped": {0}, "clip": MAX_NORM},
    "asks to stop": lambda size: {"windows": UNEVEN[size][:1]},
}
CLIPPED = {("lightning", "reads"), ("transformers", "reads")}  # of those by one rank, sharded or not
NAMES = {"attacks": "{}_attacks", "sharded": "{}_sharded_attacks", "one rank": "{}_one_rank"}


def cases():
    """Where, on how many ranks, by which trainer, which attack is exact."""
    for trainer in TRAINERS:
        scenarios = globals()[f"{trainer}_attack_scenarios"]
        for size in SIZES:
            slow = scenarios.COMPILED if size == 2 else ()
            for attack in (*scenarios.EXACT, *slow, *OF_TRAINERS[trainer]):
                yield "attacks", size, trainer, attack
            slow = ("compiled",) if (size, trainer) == (2, "transformers") else ()
            for attack in (*sharded_attack_scenarios.EXACT[trainer], *slow):
                yield "sharded", size, trainer, attack
            for attack in one_rank_attack_scenarios.EXACT[trainer]:
                yield "one rank", size, trainer, attack


def truth_of(where, size, trainer, attack):
    """Keywords of `truth`."""
    name, even = attack.removesuffix(", sharded"), where == "sharded" or trainer == "lightning" or "sharded" in attack
    special = {"attacks": {**OF_ATTACKS, **OF_TRAINERS[trainer]}, "sharded": SHARDED, "one rank": BY_ONE_RANK}[where]
    keywords = {"windows": (EVEN if even else UNEVEN)[size], **special.get(name, lambda size: {})(size)}
    if where == "one rank" and (trainer, name) in CLIPPED:
        keywords["clip"] = MAX_NORM
    return keywords


@functools.cache
def expected(*case):
    """Parameters of one process."""
    return truth(case[1], **truth_of(*case))[0]


@pytest.mark.parametrize(("where", "size", "trainer", "attack"), list(cases()))
def test_exact(found, where, size, trainer, attack):
    """On all ranks."""
    name = NAMES[where].format(trainer)
    check(found[size], name)
    make = truth_of(where, size, trainer, attack).get("make", mlp)
    rounding = SHARDED_ROUNDING["fp16"] if attack == "overflow and clipping" else ROUNDING["fp32"]
    for result in found[size][name]:
        values = {key.removeprefix("_orig_mod.").removeprefix("net."): value for key, value in result[attack].items()}
        assert_close(values, expected(where, size, trainer, attack), rounding, make)


# The trainers' own errors, and ours.
REFUSED = [
    ("attacks", "accelerate", "clipped by value, sharded", "Use `clip_grad_norm_` instead"),
    ("attacks", "lightning", "a step without loss", "returning None in distributed training is not supported"),
    ("sharded", "accelerate", "several models", "Only one model is supported when using FSDP2"),
    ("sharded", "lightning", "compiled", "a compiled model is incompatible with the current strategy"),
    ("attacks", "transformers", "unequal windows", "rank 1 would end after 1 windows, and rank 0 after 2"),
    ("sharded", "accelerate", "saved inside, registered", "Call it after optimizer.step()"),
    ("one rank", "accelerate", "drops a window", "dropped by all of them"),
    ("one rank", "accelerate", "drops a window, sharded", "dropped by all of them"),
    ("one rank", "accelerate", "leaves out a step", "also where a rank leaves a micro-batch out"),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("where", "trainer", "attack", "text"), REFUSED)
def test_refused(found, size, where, trainer, attack, text):
    """On all ranks, by an error that says what to do."""
    name = NAMES[where].format(trainer)
    check(found[size], name)
    for result in found[size][name]:
        assert text in result[attack][1]


@pytest.mark.parametrize("trainer", ["accelerate", "lightning"])
@pytest.mark.parametrize("size", SIZES)
def test_saved_inside_a_window(found, size, trainer):
    """By the trainer's own checkpoint; all ranks end the window. In Lightning, one had no micro-batch in it so far."""
    name = f"{trainer}_resumed_inside"
    check(found[size], f"{trainer}_saved_inside")
    check(found[size], name)
    windows = EVEN[size][:1] if trainer == "accelerate" else without(EVEN[size], size, 0, 1)
    for values in found[size][name]:
        assert_close(values, truth(size, windows=windows)[0], ROUNDING["fp32"])


@pytest.mark.parametrize("size", SIZES)
def test_saved_inside_a_window_and_resumed_on_one_rank(found, size):
    """One process ends the window of several."""
    check(found[size], "accelerate_saved_inside")
    folder = found["folder"] / f"inside-a-window-{size}"
    values = accelerate_attack_scenarios.rest_of_a_window(folder, EVEN[size][0][2 * size :])
    assert_close(values, truth(size, windows=EVEN[size][:1])[0], ROUNDING["fp32"])


def test_saved_inside_a_window_of_four_and_resumed_on_two(found):
    """Two ranks end the window of four."""
    check(found[4], "accelerate_saved_inside")
    check(found[2], "accelerate_resumed_from_four")
    for values in found[2]["accelerate_resumed_from_four"]:
        assert_close(values, truth(4, windows=EVEN[4][:1])[0], ROUNDING["fp32"])


@pytest.mark.parametrize("kind", transformers_saving_scenarios.KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_a_trainer_that_saves_inside_a_window(found, size, kind):
    """By a callback: that run goes on, and the next one begins the window anew; without shards on one rank, too."""
    for name in ("transformers_saved_inside", "transformers_resumed_inside"):
        check(found[size], name)
        for result in found[size][name]:
            assert_close(named(result[kind]), expected("sharded", size, "transformers", "zero_grad"), ROUNDING["fp32"])
    if kind != "sharded":
        folder = found["folder"] / f"transformers-{kind}-{size}"
        values = transformers_saving_scenarios.resumed(folder, 1, kind, of=size)
        assert_close(named(values), expected("sharded", size, "transformers", "zero_grad"), ROUNDING["fp32"])


def named(values):
    """As `mlp` names them."""
    return {key.removeprefix("net."): value for key, value in values.items()}


@pytest.mark.parametrize("size", SIZES)
def test_an_epoch_that_ends_inside_a_window(found, size):
    """Its micro-batches count in the window that the next epoch ends."""
    check(found[size], "transformers_epoch_stopped")
    first, second = EVEN[size]
    for values in found[size]["transformers_epoch_stopped"]:
        assert_close(values, truth(size, windows=[[*first[:size], *first], second])[0], ROUNDING["fp32"])


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_stops(found, size):
    """By a callback, in transformers: it is said which, and after how many windows."""
    check(found[size], "transformers_stops")
    texts = [text for _, text in found[size]["transformers_stops"]]
    assert any(f"rank {size - 1} ended its training after 1 windows, while another" in text for text in texts)
