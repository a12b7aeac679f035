"""The trainers' adapters on 2 and 3 gloo ranks, held to one process on all the data: stock torch, summed in float64."""

from __future__ import annotations

import copy
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch.nn.functional import mse_loss

from tests.support.models import mlp, relative_error
from tests.support.ranks import check, run

pytest.importorskip("accelerate")
pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

import accumkernels as ak  # noqa: E402
from accumkernels.buffers.flat import aligned  # noqa: E402
from tests.support import coupled_trainer_scenarios, trainer_bytes_scenarios, trainer_scenarios  # noqa: E402
from tests.support.trainer_data import KINDS, LR, MAX_NORM, STEPS, item, items  # noqa: E402
from tests.support.trainer_loops import TRAINERS  # noqa: E402
from tests.support.trainer_truth import ROUNDING, SHARDED_ROUNDING, assert_close, truth, window_gradient  # noqa: E402
from tests.support.trainers import MODULES, SCALE, Samples, gpt2  # noqa: E402

pytestmark = [
    pytest.mark.starts,
    pytest.mark.integrations,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]


# On 2 and on 3 ranks, over which parameters do not divide.
BY_ANY = [
    trainer_scenarios.whole_parameters,
    trainer_scenarios.sharded_parameters,
    trainer_scenarios.overflows,
    trainer_scenarios.accelerate_several,
    trainer_scenarios.lightning_two_optimizers,
    trainer_scenarios.transformers_tokens,
    trainer_bytes_scenarios.sent_in_backward,
]
BY_TWO = [
    trainer_scenarios.accelerate_empty_rank,
    trainer_scenarios.accelerate_failed_backward,
    trainer_scenarios.accelerate_own_backward,
    trainer_scenarios.accelerate_recipe,
    trainer_scenarios.accelerate_ends_apart,
    trainer_scenarios.accelerate_refuses,
    trainer_scenarios.lightning_resumed,
    trainer_scenarios.lightning_inside_a_window,
    trainer_scenarios.transformers_means,
    trainer_scenarios.transformers_resumed,
    trainer_bytes_scenarios.accelerate_bytes,
    trainer_bytes_scenarios.accelerate_ends_otherwise,
    trainer_bytes_scenarios.reentrant_checkpointing,
    *coupled_trainer_scenarios.TWO_RANKS,
]


def assert_same(runs):
    """Bit for bit on every rank, where ranks keep whole parameters."""
    for other in runs[1:]:
        assert all(torch.equal(runs[0].values[k], other.values[k]) for k in other.values)


def of(results, scenario, trainer, kind):
    """The runs of a trainer, by rank."""
    check(results, scenario)
    return [result[trainer][kind] for result in results[scenario]]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What two ranks found: in one start, since the trainers take seconds to import."""
    folder = tmp_path_factory.mktemp("ranks")
    return {**run(2, folder, [*BY_ANY, *BY_TWO], MODULES), "folder": folder}


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """What three ranks found."""
    return run(3, tmp_path_factory.mktemp("three"), BY_ANY, MODULES)


@pytest.mark.parametrize("kind", [*KINDS, *trainer_scenarios.OPTIONS], ids=str)
@pytest.mark.parametrize("trainer", TRAINERS.values(), ids=lambda trainer: trainer.name)
@pytest.mark.parametrize("ranks", ["found", "three"])
def test_one_process_on_all_the_data(ranks, trainer, kind, request):
    """Unequal micro-batches, a short last window; clipped or not, and its norms.

    The last rank has one micro-batch less, but in Lightning, which communicates in every batch.
    """
    runs = of(request.getfixturevalue(ranks), "whole_parameters", trainer.name, kind)
    precision, clip = kind if isinstance(kind, tuple) else ("fp32", MAX_NORM if kind == "fused" else None)
    expected, norms = truth(len(runs), precision, clip, uneven=trainer.uneven)
    assert_same(runs)
    assert_close(runs[0].values, expected, ROUNDING[precision])
    if runs[0].norms:
        assert runs[0].norms == pytest.approx(norms, rel=ROUNDING[precision])
    assert runs[0].scale == (SCALE if precision == "fp16" else None)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("trainer", TRAINERS.values(), ids=lambda trainer: trainer.name)
@pytest.mark.parametrize("ranks", ["found", "three"])
def test_an_overflow_on_one_rank(ranks, trainer, precision, request):
    """All ranks skip the window, step the next, and have the same scale."""
    runs = of(request.getfixturevalue(ranks), "overflows", trainer.name, precision)
    assert_same(runs)
    expected, _ = truth(len(runs), precision, uneven=trainer.uneven, skipped={0})
    for left in runs:
        assert_close(left.values, expected, ROUNDING[precision])
        assert left.skipped == ([] if trainer.name == "lightning" else [True, False])
        assert left.scale == (SCALE / 2 if precision == "fp16" else None)


def test_accelerates_recipe_for_token_counts(found):
    """By the import alone, as the recipe scales the loss: outside of `accumulate()`, inside `no_sync`."""
    check(found, "accelerate_recipe")
    expected, _ = truth(2, uneven=False)
    for result in found["accelerate_recipe"]:
        for name in ("stock", "ours"):
            assert_close(result[name], expected, ROUNDING["fp32"])


def test_backwards_that_accelerate_does_not_see(found):
    """`loss.backward()` is averaged over ranks at the step, in every window."""
    check(found, "accelerate_own_backward")
    for result in found["accelerate_own_backward"]:
        assert_close(result["ours"], result["stock"], ROUNDING["fp32"])


def test_a_rank_without_micro_batches_clips_alike(found):
    """Whoever looks at `.grad`: it takes part in windows of others; one that none has had was not skipped."""
    check(found, "accelerate_empty_rank")
    results = found["accelerate_empty_rank"]
    for result in results:
        assert_close(result[False][0], result[True][0], ROUNDING["fp32"])
        assert result[False][1] == pytest.approx(result[True][1], rel=1e-6)
        assert result[False][2] == result[True][2] == [False] * 4 + [True]  # one of weight 0 was
        assert torch.equal(*(r[False][0]["0.weight"] for r in results))


@pytest.mark.parametrize("kind", ["two optimizers", "two models"])
@pytest.mark.parametrize("ranks", ["found", "three"])
def test_accelerate_with_several(ranks, kind, request):
    """One clipping over all, and what one optimizer would do."""
    results = request.getfixturevalue(ranks)
    check(results, "accelerate_several")
    runs = [result[kind] for result in results["accelerate_several"]]
    expected, norms = truth(len(runs), clip=MAX_NORM)
    assert_same(runs)
    assert_close(runs[0].values, expected, ROUNDING["fp32"])
    assert runs[0].norms == pytest.approx(norms, rel=1e-6)


def sent_by_no_sync():
    """Bytes of a window's gradients, each once, in aligned segments."""
    return sum(4 * aligned(p.numel(), torch.float32) for p in mlp().parameters())


def test_bytes_of_a_window(found):
    """Nothing in micro-batches; the gradient once, and one collective with what ranks tell each other."""
    check(found, "accelerate_bytes")
    for sent, _ in found["accelerate_bytes"]:
        *chunks, report = sent
        assert sum(chunks) == sent_by_no_sync()
        assert report == 8 * (46 - 3 + 6)  # docs/data_parallel.md: counts of 6 tensors until the layout has settled


@pytest.mark.parametrize("ranks", ["found", "three"])
@pytest.mark.parametrize("loop", ["accelerate", "lightning", "transformers", "without", "static graph"])
def test_sent_while_backward_runs(ranks, loop, request):
    """All chunks of whole windows, with the values and the bytes of sums that are sent at the end."""
    results = request.getfixturevalue(ranks)
    check(results, "sent_in_backward")
    size = len(results["sent_in_backward"])
    expected, _ = truth(size, uneven=loop not in ("lightning", "static graph"))
    for values, sent in (result[loop] for result in results["sent_in_backward"]):
        assert_close(values, expected, ROUNDING["fp32"])
        assert {when for when, _ in sent} == {"after" if loop in ("without", "static graph") else "backward"}
        assert sum(nbytes for _, nbytes in sent) == 2 * sent_by_no_sync()


def test_a_window_that_ends_otherwise_on_one_rank(found):
    """Than by a micro-batch that is known to be its last, as the other rank's does."""
    check(found, "accelerate_ends_otherwise")
    numbers = [i for i in items(2)[0] if i != 2 * STEPS - 1]
    gradient = window_gradient(mlp(), numbers, "fp32")
    expected = {name: p - LR * g for (name, p), g in zip(mlp().named_parameters(), gradient, strict=True)}
    for values in found["accelerate_ends_otherwise"]:
        assert_close(values, expected, ROUNDING["fp32"])


def test_reentrant_checkpointing_of_a_layer_called_twice(found):
    """As in stock an error, for its gradients are sent when they have come; with the option that it names it works."""
    check(found, "reentrant_checkpointing")
    model = trainer_bytes_scenarios.CalledTwice()
    for rank in range(2):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank))
        (model(x) / 2).backward()
    expected = {name: p - LR * p.grad for name, p in model.named_parameters()}
    for result in found["reentrant_checkpointing"]:
        assert result["stock"][0] == "RuntimeError"
        assert result["default"][0] == "RuntimeError"
        assert "release='microbatch'" in result["default"][1]
        assert result["microbatch"] == ("", "")
        for name, p in expected.items():
            torch.testing.assert_close(result["values"][name], p.detach())


def test_refused_on_several_ranks(found):
    """Each says what to do."""
    check(found, "accelerate_refuses")
    for result in found["accelerate_refuses"]:
        for key, kind, text in (
            ("join", "ValueError", "even_batches=True"),
            ("two that sync", "RuntimeError", "no_sync around all but the last"),
            ("local, in accumulate", "RuntimeError", "as in accelerate's LocalSGD"),
            ("local", "RuntimeError", "Use LocalSGD with accelerate's own Accelerator"),
            ("shared", "ValueError", "SGD, SGD step the same parameters"),
        ):
            assert result[key][0] == kind
            assert text in result[key][1]


@pytest.mark.parametrize("release", ["auto", "microbatch"])
def test_last_micro_batches_that_reach_other_optimizers(found, release):
    """Each optimizer has the mean over what reaches it on any rank, whichever window a rank could end first."""
    check(found, "accelerate_ends_apart")
    nets = [mlp(torch.float64), mlp(torch.float64, seed=1)]
    for window in (0, 2, 4):
        micro_batches = [
            (item(2 * i + rank), trainer_scenarios.REACHED[rank][i]) for i in (window, window + 1) for rank in range(2)
        ]
        grads = []
        for place, net in enumerate(nets):
            own = [(x.double(), y.double(), places) for (x, y), places in micro_batches if place in places]
            losses = [mse_loss(sum(nets[p](x) for p in places), y) * len(x) for x, y, places in own]
            grads.append(torch.autograd.grad(sum(losses) / sum(len(x) for x, _, _ in own), list(net.parameters())))
        for net, of_net in zip(nets, grads, strict=True):
            for p, grad in zip(net.parameters(), of_net, strict=True):
                p.data -= LR * grad
    for result in found["accelerate_ends_apart"]:
        for values, net in zip(result[release], nets, strict=True):
            for name, p in net.named_parameters():
                torch.testing.assert_close(values[name].double(), p.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", ["found", "three"])
def test_lightning_with_two_optimizers(ranks, request):
    """Each has the weighted mean of its own losses, over all ranks, and is clipped for itself."""
    results = request.getfixturevalue(ranks)
    check(results, "lightning_two_optimizers")
    size = len(results["lightning_two_optimizers"])
    one, two = mlp(), mlp(seed=1)
    for numbers in items(size, uneven=False):
        grads, stepped = [], one
        for place, own in enumerate((one, two)):
            sums, weight = [torch.zeros_like(p, dtype=torch.float64) for p in own.parameters()], 0
            for i in numbers:
                x, y = item(i)
                # In the last batch, the first is stepped before the second sees it.
                first = stepped if place and i in numbers[-size:] else one
                mse_loss(first(x) + two(x), y if place else -y).backward()
                for total, p in zip(sums, own.parameters(), strict=True):
                    total += p.grad.double() * len(x)
                for p in [*one.parameters(), *two.parameters(), *first.parameters()]:
                    p.grad = None
                weight += len(x)
            grads.append([total / weight for total in sums])
            if not place:
                stepped = copy.deepcopy(one)
                _step(stepped, grads[0])
        one = stepped
        _step(two, grads[1])
    for values in results["lightning_two_optimizers"]:
        actual = [values[f"{name}.{key}"] for name in ("one", "two") for key, _ in one.named_parameters()]
        expected = [*one.parameters(), *two.parameters()]
        start = [*mlp().parameters(), *mlp(seed=1).parameters()]
        way = [[(b - a).detach() for a, b in zip(start, end, strict=True)] for end in (actual, expected)]
        assert relative_error(*way) < ROUNDING["fp32"]


def _step(model, grads):
    norm = torch.cat([g.flatten() for g in grads]).norm().item()
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.data -= (LR * grad * min(1.0, MAX_NORM / norm)).float()


@pytest.mark.parametrize("ranks", ["found", "three"])
def test_tokens_of_all_ranks(ranks, request):
    """The mean over every label, twice; the second `train()` finds the model wrapped."""
    results = request.getfixturevalue(ranks)
    check(results, "transformers_tokens")
    size = len(results["transformers_tokens"])
    data = Samples(STEPS * size, masked=1)
    model = gpt2(layers=1)
    for name, p in model.named_parameters():
        assert torch.equal(p, results["transformers_tokens"][0][0][name])
    start = [p.detach().clone() for p in model.parameters()]
    for stage in (1, 2):
        twin = copy.deepcopy(model).double()
        twin(**{key: torch.stack([sample[key] for sample in data.samples]) for key in data[0]})["loss"].backward()
        for p, grown in zip(model.parameters(), twin.parameters(), strict=True):
            p.data -= (LR * grown.grad).float()
        for result in results["transformers_tokens"]:
            values = result[stage]
            way = [
                [values[name] - a for (name, _), a in zip(model.named_parameters(), start, strict=True)],
                [p.detach() - a for p, a in zip(model.parameters(), start, strict=True)],
            ]
            assert relative_error(*way) < 5e-6  # through the model in fp32


@pytest.mark.parametrize("optimizers", ["one", "two"])
def test_a_backward_that_fails(found, optimizers):
    """It leaves nothing, so that running it again gives what would have been without; and the same bits each time."""
    check(found, "accelerate_failed_backward")
    expected, _ = truth(2, uneven=False)
    for result in found["accelerate_failed_backward"]:
        once, again = (result[name][0] for name in (optimizers, "again" if optimizers == "one" else "two again"))
        assert_close(once, expected, ROUNDING["fp32"])
        assert all(torch.equal(once[name], again[name]) for name in once)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "overridden"])
def test_means_of_all_ranks(found, kind):
    """Of a loss that drops `num_items_in_batch`: not added up, and the labels of all ranks count the same."""
    check(found, "transformers_means")
    size = len(found["transformers_means"])
    data = Samples((STEPS + 2) * size, masked=1)
    twin = trainer_scenarios.Dropping().double()
    start = copy.deepcopy(dict(twin.named_parameters()))
    losses = []
    for ends in ((0, STEPS * size), (STEPS * size, len(data))):
        loss = twin(**data.batch(*ends))["loss"]
        twin.zero_grad()
        loss.backward()
        losses.append(loss.item())
        for p in twin.parameters():
            p.data -= LR * p.grad
    for result in found["transformers_means"]:
        values, logged = result[kind]
        way = [
            [v[name].detach() - start[name].detach() for name in start] for v in (values, dict(twin.named_parameters()))
        ]
        assert relative_error(*way) < ROUNDING["fp32"]
    assert found["transformers_means"][0][kind][1] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("trainer", ["lightning", "transformers"])
def test_resumed_on_one_rank(found, trainer):
    """What rank 0 has saved at the end of a window: masters, of which the checkpoint's model is the rounding."""
    name = f"{trainer}_resumed"
    check(found, name)
    if trainer == "lightning":
        checkpoint = torch.load(found["folder"] / "window-2.ckpt", weights_only=True)
        (state,) = (value for key, value in checkpoint["callbacks"].items() if key.startswith("FusedAccumulation"))
        model, expected = mlp(torch.bfloat16), {f"net.{k}": v for k, v in found[name][0].items()}
        state["shapes"] = {key.removeprefix("net."): shape for key, shape in state["shapes"].items()}
        state["masters"] = {key.removeprefix("net."): master for key, master in state["masters"].items()}
        saved = checkpoint["state_dict"]
    else:
        assert [result[0] for result in found[name]] == [True, True]
        folder = found["folder"] / "transformers-2" / "checkpoint-2"
        state = torch.load(folder / "accumulator.pt", weights_only=True)
        model, expected = gpt2(torch.bfloat16, layers=1), found[name][0][1]
        saved = expected
    acc = ak.FusedAccumulator(model, master_weights=True)
    acc.load_state_dict(state)
    assert acc.micro_batches == 0
    for (key, p), master in zip(model.named_parameters(), acc.parameters(), strict=True):
        key = f"net.{key}" if trainer == "lightning" else key
        assert torch.equal(p, saved[key])
        assert torch.equal(p, expected[key])
        assert master.dtype == torch.float32
    assert not all(torch.equal(p.float(), m) for p, m in zip(model.parameters(), acc.parameters(), strict=True))


def test_saved_inside_a_window(found):
    """What all ranks have accumulated, in rank 0's checkpoint; one process ends the window with the rest."""
    check(found, "lightning_inside_a_window")
    state = found["lightning_inside_a_window"][0]
    model = mlp()
    for entry in ("shapes", "sums"):
        state[entry] = {key.removeprefix("net."): value for key, value in state[entry].items()}
    state["touched"] = [key.removeprefix("net.") for key in state["touched"]]
    acc = ak.FusedAccumulator(model)
    acc.load_state_dict(state)
    numbers = items(2, uneven=False)[0]
    for i in numbers[4:]:  # two on each rank are done
        x, y = item(i)
        acc.backward(mse_loss(model(x), y), len(x))
    acc.step(torch.optim.SGD(model.parameters(), lr=LR))
    moved = [a - b for a, b in zip(mlp().parameters(), model.parameters(), strict=True)]
    expected = [LR * grad for grad in window_gradient(mlp(), numbers, "fp32")]
    assert relative_error(moved, expected) < ROUNDING["fp32"]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("ranks", ["found", "three"])
def test_fsdp2(ranks, trainer, kind, request):
    """Unequal micro-batches on ranks, whose gradients FSDP2 averages inside backward."""
    runs = of(request.getfixturevalue(ranks), "sharded_parameters", trainer, kind)
    precision, clip = kind
    expected, norms = truth(len(runs), "fp32", clip, uneven=False)
    for left in runs:
        assert_close(left.values, expected, SHARDED_ROUNDING[precision])
        if left.norms:
            assert left.norms == pytest.approx(norms, rel=1e-6 if precision == "fp32" else SHARDED_ROUNDING[precision])
        assert left.scale == (SCALE if precision == "fp16" else None)


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("ranks", ["found", "three"])
def test_fsdp2_with_an_overflow_on_one_rank(ranks, trainer, request):
    """With a GradScaler: all skip the window, and step the next."""
    runs = of(request.getfixturevalue(ranks), "sharded_parameters", trainer, "overflow")
    expected, _ = truth(len(runs), uneven=False, skipped={0})
    for left in runs:
        assert_close(left.values, expected, SHARDED_ROUNDING["fp16"])
        assert left.skipped == ([] if trainer == "lightning" else [True, False])
        assert left.scale == SCALE / 2


@pytest.mark.parametrize("scenario", coupled_trainer_scenarios.TWO_RANKS, ids=lambda scenario: scenario.__name__)
def test_coupled_losses(found, scenario):
    """One process on all the data: with negatives of the rank's own, or gathered, and one optimizer or two."""
    check(found, scenario.__name__)
