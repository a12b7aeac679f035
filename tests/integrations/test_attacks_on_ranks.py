"""Attacks on the trainers' adapters on 2 ranks, held to one process on all the data: docs/data_parallel.md.

What other tests attack, with their names, is in that page's table too. test_trainers_on_ranks.py has more ranks.
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

from tests.support import trainer_attacks  # noqa: E402
from tests.support.models import mlp  # noqa: E402
from tests.support.trainer_attacks import LAST, LEFT_OUT, TO_STEPS, Turns  # noqa: E402
from tests.support.trainer_data import MAX_NORM, MAX_VALUE, STEPS, Heads, items  # noqa: E402
from tests.support.trainer_truth import ROUNDING, SHARDED_ROUNDING, assert_close, truth  # noqa: E402
from tests.support.trainers import MODULES  # noqa: E402

pytestmark = [
    pytest.mark.starts,
    pytest.mark.integrations,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]

SIZE = 2
TRAINERS = ("accelerate", "lightning", "transformers")
SCENARIOS = [
    trainer_attacks.accelerate_attacks,
    trainer_attacks.accelerate_saved_inside,
    trainer_attacks.accelerate_resumed_inside,
    trainer_attacks.lightning_attacks,
    trainer_attacks.lightning_saved_inside,
    trainer_attacks.lightning_resumed_inside,
    trainer_attacks.transformers_attacks,
    trainer_attacks.transformers_saved_inside,
    trainer_attacks.transformers_resumed_inside,
    trainer_attacks.transformers_epoch_stopped,
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two ranks found, after three have saved a window in the same folder; and that folder."""
    folder = tmp_path_factory.mktemp("attacks")
    three = run(3, folder, [trainer_attacks.accelerate_saved_inside], MODULES)
    check(three, "accelerate_saved_inside")
    last = trainer_attacks.transformers_stops
    two = run(SIZE, folder, [*SCENARIOS, trainer_attacks.accelerate_resumed_from_three, last], MODULES)
    return {**two, "folder": folder}


def without(windows, *numbers):
    """Windows in which some micro-batches of the last rank, by their number on that rank, are left out."""
    left_out = {number * SIZE + SIZE - 1 for number in numbers}
    return [[i for i in window if i not in left_out] for window in windows]


def regrouped(*steps):
    """Windows of so many micro-batches of each rank."""
    numbers = iter(range(SIZE * sum(steps)))
    return [[next(numbers) for _ in range(SIZE * n)] for n in steps]


def clamped(grad):
    """By value."""
    return grad.clamp(-MAX_VALUE, MAX_VALUE)


def doubled(grad):
    """By a callback."""
    return 2 * grad


EVEN = items(SIZE, uneven=False)
UNEVEN = items(SIZE)

# What all trainers serve, sharded too where there is a second mark, and in that case alone where it is the only one.
COMMON = {
    "gradients changed": ("plain", "sharded"),
    "gradients replaced": ("plain",),
    "zero_grad": ("plain", "sharded"),
    "zero_grad on one rank": ("plain", "sharded"),
    "reads": ("plain", "sharded"),
    "reads, clipped": ("plain", "sharded"),
    "unused": ("plain",),
    "unused, not said": ("plain",),
    "checkpointing": ("plain", "sharded"),
    "checkpointing, reentrant": ("plain", "sharded"),
    "left out": ("sharded",),
    "clipped by value": ("plain",),
    "validation": ("plain", "sharded"),
    "a step fails": ("plain",),
}
OWN = {
    "accelerate": {
        "static graph": ("plain",),
        "unused in turns": ("sharded",),
        "steps changed": ("plain",),
        "saved inside": ("sharded",),
        "several optimizers": ("sharded",),
        "overflow and clipping": ("sharded",),
        "fails in the last backward": ("plain",),
        "fails before the last backward": ("plain",),
        "overflows in the last backward": ("plain",),
        "asks to stop": ("plain",),
    },
    "lightning": {
        "clipped by value": ("sharded",),
        "clipped by value, by the Trainer": ("plain", "sharded"),
        "unused in turns": ("sharded",),
        "steps changed": ("plain", "sharded"),
        "early stopping": ("plain",),
        "saved inside": ("sharded",),
    },
    "transformers": {
        "static graph": ("plain",),
        "clipped by value": ("sharded",),
        "validation inside": ("plain", "sharded"),
    },
}
COMPILED = {
    "accelerate": {"compiled": ("plain", "sharded"), "compiled before": ("plain",)},
    "lightning": {"compiled": ("plain",), "compiled, static graph": ("plain",)},
    "transformers": {"compiled": ("plain", "sharded")},
}
# What one process is to make of an attack, by its name; of the others, all the data as it is.
OF_ATTACKS = {
    "clipped by value": {"change": clamped},
    "clipped by value, by the Trainer": {"change": clamped},
    "gradients changed": {"change": doubled},
    "gradients replaced": {"change": doubled},
    "reads, clipped": {"clip": MAX_NORM},
    "unused": {"make": Heads},
    "unused, not said": {"make": Heads},
    "left out": {"windows": without(EVEN, LEFT_OUT)},
    "unused in turns": {"make": functools.partial(Turns, SIZE)},
    "overflow and clipping": {"skipped": {0}, "clip": MAX_NORM},
    "fails in the last backward": {"windows": without(UNEVEN, LAST), "clip": MAX_NORM},
    "fails before the last backward": {"windows": without(UNEVEN, LAST), "clip": MAX_NORM},
    "overflows in the last backward": {"skipped": {0}, "clip": MAX_NORM},
    "asks to stop": {"windows": UNEVEN[:1]},
}
OF_TRAINERS = {
    ("accelerate", "a step fails"): {"windows": without(UNEVEN, 1)},
    ("accelerate", "steps changed"): {"windows": regrouped(STEPS + 1, 1)},
    ("lightning", "a step fails"): {"windows": without(EVEN, 1, LAST)},
    ("lightning", "steps changed"): {"windows": [*EVEN, *regrouped(2, 2, 2)]},
    ("lightning", "steps changed, sharded"): {"windows": regrouped(TO_STEPS, STEPS + 2 - TO_STEPS)},
    ("lightning", "early stopping"): {"windows": [*EVEN, *EVEN]},
    ("transformers", "a step fails"): {"windows": without(UNEVEN, 1, LAST)},
}


def cases():
    """By which trainer, which attack is exact."""
    for trainer, own in OWN.items():
        for served in (COMMON, own, COMPILED[trainer]):
            for attack, modes in served.items():
                yield from ((trainer, attack if mode == "plain" else f"{attack}, sharded") for mode in modes)


def truth_of(trainer, attack):
    """Keywords of `truth`."""
    name, even = attack.removesuffix(", sharded"), trainer == "lightning" or "sharded" in attack
    special = OF_TRAINERS.get((trainer, attack)) or OF_ATTACKS.get(name, {})
    return {"windows": EVEN if even else UNEVEN, **special}


@functools.cache
def expected(trainer, attack):
    """Parameters of one process."""
    return truth(SIZE, **truth_of(trainer, attack))[0]


@pytest.mark.parametrize(("trainer", "attack"), list(cases()))
def test_exact(found, trainer, attack):
    """On all ranks."""
    check(found, f"{trainer}_attacks")
    make = truth_of(trainer, attack).get("make", mlp)
    rounding = SHARDED_ROUNDING["fp16"] if "overflow and clipping" in attack else ROUNDING["fp32"]
    for result in found[f"{trainer}_attacks"]:
        values = {key.removeprefix("_orig_mod.").removeprefix("net."): value for key, value in result[attack].items()}
        assert_close(values, expected(trainer, attack), rounding, make)


# The trainers' own errors, and ours.
REFUSED = [
    ("accelerate", "clipped by value, sharded", "Use `clip_grad_norm_` instead"),
    ("lightning", "a step without loss", "returning None in distributed training is not supported"),
    ("accelerate", "several models", "Only one model is supported when using FSDP2"),
    ("lightning", "compiled, sharded", "a compiled model is incompatible with the current strategy"),
    ("transformers", "unequal windows", "rank 1 would end after 1 windows, and rank 0 after 2"),
    ("accelerate", "saved inside, registered", "Call it after optimizer.step()"),
    ("accelerate", "drops a window", "dropped by all of them"),
    ("accelerate", "drops a window, sharded", "dropped by all of them"),
    ("accelerate", "leaves out a step", "also where a rank leaves a micro-batch out"),
]


@pytest.mark.parametrize(("trainer", "attack", "text"), REFUSED)
def test_refused(found, trainer, attack, text):
    """On all ranks, by an error that says what to do."""
    check(found, f"{trainer}_attacks")
    for result in found[f"{trainer}_attacks"]:
        assert text in result[attack][1]


@pytest.mark.parametrize("trainer", ["accelerate", "lightning"])
def test_saved_inside_a_window(found, trainer):
    """By the trainer's own checkpoint; all ranks end the window. In Lightning, one had no micro-batch in it so far."""
    name = f"{trainer}_resumed_inside"
    check(found, f"{trainer}_saved_inside")
    check(found, name)
    windows = EVEN[:1] if trainer == "accelerate" else without(EVEN, 0, 1)
    for values in found[name]:
        assert_close(values, truth(SIZE, windows=windows)[0], ROUNDING["fp32"])


def test_saved_inside_a_window_and_resumed_on_one_rank(found):
    """One process ends the window of several."""
    check(found, "accelerate_saved_inside")
    folder = found["folder"] / f"inside-a-window-{SIZE}"
    values = trainer_attacks.rest_of_a_window(folder, EVEN[0][2 * SIZE :])
    assert_close(values, truth(SIZE, windows=EVEN[:1])[0], ROUNDING["fp32"])


def test_saved_inside_a_window_of_three_and_resumed_on_two(found):
    """Two ranks end the window of three."""
    check(found, "accelerate_resumed_from_three")
    for values in found["accelerate_resumed_from_three"]:
        assert_close(values, truth(3, windows=items(3, uneven=False)[:1])[0], ROUNDING["fp32"])


@pytest.mark.parametrize("kind", trainer_attacks.KINDS)
def test_a_trainer_that_saves_inside_a_window(found, kind):
    """By a callback: that run goes on, and the next one begins the window anew; without shards on one rank, too."""
    for name in ("transformers_saved_inside", "transformers_resumed_inside"):
        check(found, name)
        for result in found[name]:
            assert_close(named(result[kind]), expected("transformers", "zero_grad, sharded"), ROUNDING["fp32"])
    if kind != "sharded":
        folder = found["folder"] / f"transformers-{kind}-{SIZE}"
        values = trainer_attacks.resumed(folder, 1, kind, of=SIZE)
        assert_close(named(values), expected("transformers", "zero_grad, sharded"), ROUNDING["fp32"])


def named(values):
    """As `mlp` names them."""
    return {key.removeprefix("net."): value for key, value in values.items()}


def test_an_epoch_that_ends_inside_a_window(found):
    """Its micro-batches count in the window that the next epoch ends."""
    check(found, "transformers_epoch_stopped")
    first, second = EVEN
    for values in found["transformers_epoch_stopped"]:
        assert_close(values, truth(SIZE, windows=[[*first[:SIZE], *first], second])[0], ROUNDING["fp32"])


def test_a_rank_that_stops(found):
    """By a callback, in transformers: it is said which, and after how many windows."""
    check(found, "transformers_stops")
    texts = [text for _, text in found["transformers_stops"]]
    assert any(f"rank {SIZE - 1} ended its training after 1 windows, while another" in text for text in texts)
