"""`python -m accumkernels compare`: what it measures on a user's model, and what it refuses."""

from __future__ import annotations

import copy
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from accumkernels.__main__ import main
from accumkernels.demo import report

pytestmark = pytest.mark.usefixtures("one_thread")

FP32_ERROR = 1e-5  # sums over some 1,000 terms that round to 2**-24 = 6e-8 each
BF16_ERROR = 0.02  # operands round to 2**-9, and errors of the terms average out
IGNORED = -100


class Tagger(nn.Module):
    """A class per token."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.dropout, self.head = nn.Embedding(20, 8), nn.Dropout(dropout), nn.Linear(8, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.embedding(tokens)))


class Noise(nn.Module):
    """Another function at each call, whatever the mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(())


def texts(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts of 1 to 12 tokens, padded."""
    generator = torch.Generator().manual_seed(7)
    targets = torch.randint(5, (count, 12), generator=generator)
    for row, length in enumerate(torch.randint(1, 13, (count,), generator=generator).tolist()):
        targets[row, length:] = IGNORED
    return torch.randint(20, (count, 12), generator=generator), targets


def mean_over_tokens(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss without its weight."""
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def weighted(output: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with it."""
    return mean_over_tokens(output, targets), (targets != IGNORED).sum()


def small(count: int, loss_fn):
    """A loss that runs out of memory with more than `count` samples."""

    def loss(output, target):
        if len(output) > count:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss_fn(output, target)

    return loss


def images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of one size."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, 6, generator=generator), torch.randint(4, (count,), generator=generator)


@pytest.fixture
def compare(monkeypatch, tmp_path, capsys):
    """Runs the command on a factory's dict; returns the status, what was printed, the errors, and compare.json."""

    def run(*options, **made):
        module = ModuleType("user_train")
        torch.manual_seed(0)
        module.fit = lambda: made
        monkeypatch.setitem(sys.modules, "user_train", module)
        monkeypatch.setenv("COLUMNS", "80")
        out = tmp_path / "out"
        base = ["compare", "user_train:fit", "--device", "cpu", "--rounds", "1", "--micro-batch-size", "4"]
        status = main([*base, "--out", str(out), *options])
        printed = capsys.readouterr()
        found = json.loads((out / "compare.json").read_text()) if status == 0 else None
        return SimpleNamespace(status=status, out=printed.out, err=printed.err, found=found, folder=out)

    return run


def test_measures_speed_memory_and_errors(compare):
    """Weights from loss_fn: FusedAccumulator's gradient is the big batch's; stock is off by what float64 says."""
    model = Tagger()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    made = compare("--accumulate", "3", "--rounds", "2", model=model, make_batch=texts, loss_fn=weighted)
    assert made.status == 0, made.err
    assert all(len(line) <= 80 for line in made.out.splitlines() if not line.startswith(str(made.folder)))
    assert (made.folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(parameter._backward_hooks or parameter.grad is not None for parameter in model.parameters())

    big, stock, fused = made.found["runs"]
    assert (made.found["settings"]["unit"], made.found["settings"]["exact_gradient"]) == (
        "tokens",
        "float64, in one batch",
    )
    for window, count in (("full", 12), ("short", 3)):
        assert big["gradient_errors"][window] < FP32_ERROR
        assert fused["gradient_errors"][window] < FP32_ERROR
        assert stock["gradient_errors"][window] == pytest.approx(error_of_stock(model, count), rel=1e-3)
    inputs, targets = texts(12)
    for run in (big, stock, fused):
        assert run["tokens"] == [int((targets != IGNORED).sum())] * 2
        assert run["tokens_per_second"] > 0
        assert run["peak_bytes"] > 12 * made.found["settings"]["parameters"]  # weights and Adam's moments in fp32
    assert made.found["versions"]["torch"] == torch.__version__


def error_of_stock(model, count):
    """In float64: the sum of micro-batches' gradients over 3, whatever ran, against the big batch's gradient."""
    model = copy.deepcopy(model).double()
    inputs, targets = (tensor[:count] for tensor in texts(12))

    def gradient(rows):
        parts = torch.autograd.grad(mean_over_tokens(model(inputs[rows]), targets[rows]), list(model.parameters()))
        return torch.cat([part.flatten() for part in parts])

    exact = gradient(slice(None))
    stock = sum(gradient(slice(start, start + 4)) for start in range(0, count, 4)) / 3
    return float((stock - exact).norm() / exact.norm())


def test_without_weights_it_says_what_is_missing(compare):
    """A mean over tokens with nothing but samples to weigh it: the gradient is off, which is not passed over."""
    made = compare(model=Tagger(), make_batch=texts, loss_fn=mean_over_tokens)
    assert made.status == 0, made.err
    assert made.found["settings"]["unit"] == "samples"
    assert made.found["runs"][2]["gradient_errors"]["full"] > 0.01
    said = " ".join(made.out.split())
    assert "return (loss, weight)" in said
    assert "weight=len(x)" not in said


def labelled(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts of 12 tokens, a few of which have no label: micro-batches hold nearly as many."""
    tokens, targets = torch.ones(count, 12, dtype=torch.long), texts(count)[1].clamp(min=0)
    targets[::3, 10:] = IGNORED
    return tokens.cumsum(1) % 20, targets


@pytest.mark.parametrize("amp", [[], ["--amp", "bf16"]])
def test_a_missing_weight_that_changes_little(compare, amp):
    """Less than rounding to 16 bit does, and 1,000 times what fp32's rounding does: it is not passed over."""
    torch.manual_seed(0)
    made = compare(*amp, model=Tagger(), make_batch=labelled, loss_fn=mean_over_tokens)
    errors = [run["gradient_errors"]["full"] for run in made.found["runs"]]
    assert 1e-3 < errors[2] < 0.01 and (amp or errors[0] < FP32_ERROR), errors
    assert "return (loss, weight)" in " ".join(made.out.split())
    made = compare(*amp, model=Tagger(), make_batch=labelled, loss_fn=weighted)
    assert "return (loss, weight)" not in " ".join(made.out.split())


def test_keyword_batches_and_autocast(compare):
    """As models of transformers have: the loss is in the output; errors are those of bf16's rounding."""

    class Classifier(nn.Linear):
        def forward(self, x, labels):
            return {"loss": nn.functional.cross_entropy(super().forward(x), labels)}

    make_batch = lambda n: dict(zip(("x", "labels"), images(n), strict=True))  # noqa: E731
    made = compare("--amp", "bf16", model=Classifier(6, 4), make_batch=make_batch)
    big, stock, fused = made.found["runs"]
    assert FP32_ERROR < fused["gradient_errors"]["full"] < BF16_ERROR
    assert stock["gradient_errors"]["full"] < BF16_ERROR  # of equal micro-batches
    assert stock["gradient_errors"]["short"] == pytest.approx(5 / 8, abs=0.05)  # 3 of 8, divided by 8
    assert made.found["settings"]["autocast"] == "bfloat16"
    assert "return (loss, weight)" not in " ".join(made.out.split())


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--amp", "bf16"], "FusedAccumulator(model, cache_casts=True)"),
        (["--amp", "bf16", "--no-cache-casts"], "FusedAccumulator(model)"),
        ([], "FusedAccumulator(model)"),
    ],
)
def test_recommends_what_was_measured(compare, options, line):
    """Not copies of weights that the model edits, nor those of an autocast that is not there."""
    made = compare(*options, model=nn.Linear(6, 4), make_batch=images, loss_fn=nn.functional.cross_entropy)
    assert f"acc = accumkernels.{line}\n" in made.out


def test_the_dtype_of_the_model_is_named(compare):
    """Without autocast it is what rounds; a picture of errors of one part in a hundred must not say float32."""
    half = {"make_batch": lambda n: (images(n)[0].bfloat16(), images(n)[1]), "loss_fn": nn.functional.cross_entropy}
    made = compare(model=nn.Linear(6, 4).bfloat16(), **half)
    assert (made.found["settings"]["autocast"], made.found["settings"]["computed_in"]) == (None, "bfloat16")
    assert "Rounding of bfloat16 is in every row" in " ".join(made.out.split())


def test_a_picture_that_cannot_be_written_leaves_no_file(compare, monkeypatch):
    """Neither half of the results."""

    def fails(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(report, "draw", fails)
    made = compare(model=nn.Linear(6, 4), make_batch=images, loss_fn=nn.functional.cross_entropy)
    assert (made.status, made.err) == (2, "accumkernels compare: error: disk full\n")
    assert list(made.folder.iterdir()) == []


def test_large_rates_have_no_exponents():
    """In the table and above the bars."""
    assert [report.rate(value) for value in (981.93, 1097.2, 11390.4)] == ["981.9", "1,097", "11,390"]


@pytest.mark.parametrize(("place", "hint"), [("train.py:fit", "train:fit"), ("sub/other.py:fit", "sub.other:fit")])
def test_files_are_no_modules(capsys, place, hint):
    """The error says how to write it."""
    assert main(["compare", place, "--device", "cpu"]) == 2
    assert capsys.readouterr().err.endswith(f"from a folder on the path: {hint}\n")


def test_fp16_takes_a_scaler_whose_scale_fits(compare):
    """A loss so large that its gradients overflow at 2**16 is not compared by its infinities."""
    loss_fn = lambda output, target: 30 * nn.functional.cross_entropy(output, target)  # noqa: E731
    made = compare("--amp", "fp16", model=nn.Linear(6, 4), make_batch=images, loss_fn=loss_fn)
    assert made.found["settings"]["loss_scale"] < 2**16
    assert made.found["runs"][2]["gradient_errors"]["full"] < BF16_ERROR
    assert "scaler=scaler" in made.out


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Tagger(dropout=0.5), "random in train mode"),
        (nn.Sequential(nn.Embedding(20, 5), nn.BatchNorm1d(12)), "'1' normalizes"),
    ],
)
def test_gradients_are_compared_in_eval_mode_where_training_has_none(compare, model, why):
    """Dropout and BatchNorm in training: there is no gradient of the big batch to compare with, and it says so."""
    made = compare(model=model, make_batch=texts, loss_fn=weighted)
    assert made.status == 0, made.err
    assert why in made.found["settings"]["eval_mode"]
    assert "in eval mode, since" in " ".join(made.out.split())
    assert "with a gradient error in eval mode of" in " ".join(made.out.split())
    assert made.found["runs"][2]["gradient_errors"]["full"] < FP32_ERROR
    assert model.training


def test_batchnorm_trains_on_no_single_sample(compare):
    """Which it refuses: samples are weighed one by one, and the last micro-batch of the short window has one."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    made = compare("--accumulate", "4", model=model, make_batch=images, loss_fn=nn.functional.cross_entropy)
    assert made.status == 0, made.err
    assert made.found["runs"][2]["gradient_errors"]["short"] < FP32_ERROR


def test_a_big_batch_over_the_budget_is_shown_with_its_memory(compare):
    """It is not trained, its bytes are above the line, and its gradient is that of the device without the limit."""
    wide = nn.Sequential(nn.Linear(6, 200), nn.GELU(), nn.Linear(200, 4))
    free = compare(model=wide, make_batch=images, loss_fn=nn.functional.cross_entropy)
    peaks = [run["peak_bytes"] for run in free.found["runs"]]
    budget = (peaks[0] + max(peaks[1:])) // 2
    made = compare("--memory-limit", f"{budget} B", model=wide, make_batch=images, loss_fn=nn.functional.cross_entropy)
    assert made.status == 0, made.err
    big, stock, fused = made.found["runs"]
    assert (big["fits"], stock["fits"], fused["fits"]) == (False, True, True)
    assert big["peak_bytes"] == peaks[0] > budget > fused["peak_bytes"]
    assert "tokens_per_second" not in big
    assert " over" in made.out


def test_a_big_batch_that_no_memory_holds(compare):
    """The exact gradient is the sum of single samples', weighted, and it says so."""
    made = compare("--accumulate", "3", model=Tagger(), make_batch=texts, loss_fn=small(4, weighted))
    assert made.status == 0, made.err
    big, stock, fused = made.found["runs"]
    assert made.found["settings"]["exact_gradient"].startswith("float64, as the sum of its samples'")
    assert "as the sum of its samples'" in " ".join(made.out.split())
    assert big["fits"] is False
    assert "full" not in big.get("gradient_errors", {})
    assert max(fused["gradient_errors"].values()) < FP32_ERROR < stock["gradient_errors"]["full"]


@pytest.mark.parametrize("most", [100, 4])
def test_a_sample_without_labels(compare, most):
    """Its own mean is nan; it counts nothing in a micro-batch or in the exact gradient, of a batch that fits or not."""

    def unlabelled(count):
        tokens, targets = texts(count)
        targets[1] = IGNORED
        return tokens, targets

    made = compare("--accumulate", "3", model=Tagger(), make_batch=unlabelled, loss_fn=small(most, weighted))
    assert made.status == 0, made.err
    assert made.found["settings"]["exact_gradient"].startswith(
        "float64, in one" if most == 100 else "float64, as the sum"
    )
    assert max(made.found["runs"][2]["gradient_errors"].values()) < FP32_ERROR


def test_float32_where_float64_does_not_run(compare):
    """A constant of the loss in fp32 meets an output in fp64."""
    weight = torch.ones(4)
    loss_fn = lambda output, target: nn.functional.cross_entropy(output, target, weight)  # noqa: E731
    made = compare(model=nn.Linear(6, 4), make_batch=images, loss_fn=loss_fn)
    assert made.found["settings"]["exact_gradient"] == "float32, in one batch"


@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        (
            [],
            {"loss_fn": small(3, nn.functional.cross_entropy)},
            "a micro-batch of 4 does not fit (CUDA out of memory): ",
        ),
        (
            ["--memory-limit", "100 B"],
            {},
            "a micro-batch of 4 does not fit (stock accumulation: out of the memory limit",
        ),
        ([], {"model": nn.Sequential(Noise(), nn.Linear(6, 4))}, "not deterministic: two forwards of the same batch"),
        ([], {"loss_fn": lambda o, t: o.sum() * torch.nan}, "the loss of a micro-batch of 4 is nan"),
        ([], {"make_batch": lambda n: images(5)}, "make_batch(32) returned 5 samples"),
        (["--accumulate", "1"], {}, "--accumulate 1 accumulates nothing"),
        (["--micro-batch-size", "0"], {}, "--micro-batch-size must be at least 1, got 0"),
        (["--rounds", "0"], {}, "--rounds must be at least 1, got 0"),
        ([], {"loss_fn": lambda o, t: o.sum(1)}, "the loss is a tensor of shape (4,): the factory's loss_fn must"),
        ([], {"loss_fn": lambda o, t: o.sum().detach()}, "of shape () that no trainable parameter has a part in"),
        ([], {"loss_fn": lambda o, t: (o.sum(), 0)}, "loss_fn returned weights that sum to 0"),
        ([], {"loss_fn": lambda o, t: 3.0}, "what loss_fn returns must be a tensor"),
        ([], {"make_batch": None}, "give make_batch, which makes a batch of n samples"),
        (["--out", __file__], {}, f"--out {__file__}: File exists"),
        ([], {"batch": 3}, "user_train:fit returns batch; find_batch_size takes"),
        (["--device", "nonsense"], {}, "device must name a device, got 'nonsense'"),
    ],
)
def test_refuses_in_a_line(compare, options, changes, words):
    """One line that says what to change; status 2, and no file."""
    made = {"model": nn.Linear(6, 4), "make_batch": images, "loss_fn": nn.functional.cross_entropy} | changes
    found = compare(*options, **made)
    assert found.status == 2
    assert words in found.err
    assert found.err.startswith("accumkernels compare: error: ")
    assert found.err.count("\n") == 1
    assert not (found.folder / "compare.json").exists()


def test_the_users_own_bug_keeps_its_traceback(compare):
    """It is not this command's error."""

    def bug(output, target):
        raise ValueError("my own bug")

    with pytest.raises(ValueError, match="my own bug"):
        compare(model=nn.Linear(6, 4), make_batch=images, loss_fn=bug)


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
def test_missing_package(package, monkeypatch, capsys):
    """It says what to install."""
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["compare", "train:fit"]) == 2
    assert capsys.readouterr().err == f'compare needs {package}: pip install "accumkernels[demo]"\n'
