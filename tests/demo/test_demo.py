"""`python -m accumkernels demo`: what it writes, what it measures, and how it ends when something is wrong."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import accumkernels
from accumkernels.__main__ import main
from accumkernels.demo import command, report, train
from accumkernels.demo.command import Display
from accumkernels.demo.gpt import (
    CONTEXT,
    GPT,
    IGNORE,
    PADDING_STEP,
    SHORTEST,
    START,
    Batch,
    Corpus,
    Window,
    read_samples,
)

NAMES = ["big batch", "stock accumulation", "FusedAccumulator"]
CPU = torch.device("cpu")
# fp32 arithmetic against fp64: sums over some 1,000 terms that round to 2**-24 = 6e-8 each.
FP32_ERROR = 1e-5


# The demo with one small model, as short_run's: to find out how large a model this machine trains takes long.
SMALL = """
import sys
from accumkernels.__main__ import main
from accumkernels.demo import command, train

command.SHAPES = train.SHAPES = (train.Shape(128, 2, 4),)
sys.exit(main(["demo", *sys.argv[1:]]))
"""


def start(*arguments: object, cwd: Path) -> subprocess.Popen[str]:
    """The demo with a small model in a process of its own, in a directory of its own, with output as in a log."""
    root = Path(accumkernels.__file__).parents[1]
    return subprocess.Popen(
        [sys.executable, "-c", SMALL, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(root), "COLUMNS": "80"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """Three windows of a model that takes no time, from the command line: the directory, and standard output."""
    directory = tmp_path_factory.mktemp("demo")
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setenv("COLUMNS", "80")
        patch.setattr(command, "_seconds_of_product", lambda dtype: 1.0)
        patch.setattr(command, "SHAPES", (train.Shape(128, 2, 4),))
        patch.setattr(train, "SHAPES", command.SHAPES)
        assert main(["demo", "--steps", "3", "--device", "cpu", "--out", str(directory / "demo")]) == 0
    return directory, out.getvalue()


@pytest.fixture(scope="module")
def corpus():
    """Windows of 8 micro-batches of 2 samples, the number that stock accumulation divides by."""
    return Corpus(2, train.ACCUMULATION_STEPS, CPU)


@pytest.fixture(scope="module")
def model():
    """The demo's model with random weights."""
    torch.manual_seed(0)
    return GPT()


class TestCommand:
    """The whole demo, run from the command line."""

    def test_json(self, short_run):
        """`demo.json` has the three runs with their names, times and losses, one loss per window."""
        found = json.loads((short_run[0] / "demo" / "demo.json").read_text())
        assert [run["name"] for run in found["runs"]] == NAMES
        for run in found["runs"]:
            assert run["seconds"] > 0
            assert run["tokens_per_second"] > 0
            assert len(run["losses"]) == len(run["tokens"]) == 3
            assert all(0 < loss < 6 for loss in [run["final_loss"], *run["losses"]])  # log(256) = 5.5 knows nothing
        assert found["settings"]["steps"] == 3
        assert found["settings"]["autocast"] == "bfloat16"
        assert [len(losses) for losses in found["seeds"]] == [3, 3, 3]
        assert found["seeds"][0] == found["runs"][0]["losses"] != found["seeds"][1]

    def test_fused_ends_like_the_big_batch(self, short_run):
        """The final losses differ by less than 2 %, the window losses by less than bf16's rounding, 1 %."""
        big, _, fused = json.loads((short_run[0] / "demo" / "demo.json").read_text())["runs"]
        assert fused["final_loss"] == pytest.approx(big["final_loss"], rel=0.02)
        assert fused["losses"] == pytest.approx(big["losses"], rel=0.01)

    def test_measurements(self, short_run):
        """Stock is off by its unequal micro-batches, FusedAccumulator is not."""
        runs = json.loads((short_run[0] / "demo" / "demo.json").read_text())["runs"]
        big, stock, fused = runs
        for window in ("full", "short"):
            assert fused["gradient_errors_without_autocast"][window] < FP32_ERROR
            assert big["gradient_errors_without_autocast"][window] < FP32_ERROR
            assert stock["gradient_errors_without_autocast"][window] > 100 * FP32_ERROR
        assert stock["gradient_errors"]["short"] > 0.4  # 2 of 8 micro-batches, divided by 8
        assert fused["gradient_errors"]["short"] < 0.05  # rounding to bf16's 8 bits
        parameters = json.loads((short_run[0] / "demo" / "demo.json").read_text())["settings"]["parameters"]
        assert all(run["peak_bytes"] > 16 * parameters for run in runs)  # weight, gradient, two moments in fp32
        assert big["peak_bytes"] > 1.5 * max(stock["peak_bytes"], fused["peak_bytes"])  # 64 lines at once, and 8 x 8

    def test_picture(self, short_run):
        """`demo.png` is a PNG of at least 400 x 250 pixels."""
        head = (short_run[0] / "demo" / "demo.png").read_bytes()[:24]
        assert head.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", head[16:])
        assert width >= 400
        assert height >= 250

    def test_table(self, short_run):
        """The output names every method and every measure, and is plain text in a log."""
        out = short_run[1]
        rows = [line.strip() for line in out.splitlines()]
        for name in NAMES:
            assert any(row.startswith(name) for row in rows)
        for measure_name in (
            "tokens per second",
            "gradient error against the big batch in float64",
            "validation loss",
            "peak memory",
        ):
            assert measure_name in out
        assert "\x1b" not in out
        assert "window 3/3" in out
        assert all(len(line) <= 80 for line in rows if not line.startswith(("window ", str(short_run[0]))))

    def test_conclusion(self, short_run):
        """The end says what was seen on this machine, and the three lines to change."""
        end = short_run[1][short_run[1].index("On this machine") :]
        assert re.search(r"trained \d\.\d\d times as many tokens per second\s+as\s+stock", end)
        for line in (
            "FusedAccumulator(model",
            "acc.backward(loss, weight=tokens)",
            "acc.step(optimizer, max_norm=1.0)",
        ):
            assert line in end

    @pytest.mark.starts
    def test_ctrl_c(self, tmp_path):
        """SIGINT ends it with one line, status 130 and no file."""
        process = start("--steps", 500, "--amp", "none", "--device", "cpu", "--out", "here", cwd=tmp_path)
        assert process.stdout.readline().startswith("A byte-level GPT")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 130
        assert "Traceback" not in out + err
        last = err.splitlines()[-1]
        assert "interrupted" in last
        assert "no results were written" in last
        assert not list((tmp_path / "here").iterdir())

    @pytest.mark.parametrize("device", ["nonsense", "mps", "cuda:99"])
    def test_wrong_device(self, device, tmp_path, capsys):
        """A device that is not there is one line that names it, and status 2."""
        assert main(["demo", "--device", device, "--out", str(tmp_path / "out")]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert f"--device {device}" in lines[0]

    def test_directory_that_cannot_be_made(self, tmp_path, capsys):
        """An `--out` below a file is one line, before any training."""
        (tmp_path / "file").touch()
        assert main(["demo", "--device", "cpu", "--out", str(tmp_path / "file" / "out")]) == 2
        assert f"--out {tmp_path / 'file' / 'out'}: Not a directory" in capsys.readouterr().err.splitlines()[0]

    @pytest.mark.parametrize("package", ["rich", "matplotlib"])
    def test_missing_package(self, package, monkeypatch, capsys):
        """Without one of the demo's packages it says what to install."""
        monkeypatch.setitem(sys.modules, package, None)
        assert main(["demo"]) == 2
        assert capsys.readouterr().err == f'the demo needs {package}: pip install "accumkernels[demo]"\n'

    @pytest.mark.parametrize("steps", ["0", "-1", "many"])
    def test_wrong_steps(self, steps, capsys):
        """`--steps` is a positive number."""
        with pytest.raises(SystemExit, match="2"):
            main(["demo", "--steps", steps])
        assert "--steps" in capsys.readouterr().err


class TestData:
    """Samples, windows and batches."""

    @given(st.lists(st.binary(min_size=1, max_size=CONTEXT), min_size=1, max_size=9))
    @settings(deadline=None, max_examples=50)
    def test_collate(self, samples):
        """A row holds its sample, the inputs one byte later; the rest is padding that no target counts."""
        batch = Batch.collate(samples, CPU)
        assert batch.tokens == sum(map(len, samples)) == int((batch.targets != IGNORE).sum())
        assert batch.inputs.shape == batch.targets.shape
        assert batch.inputs.shape[1] % PADDING_STEP == 0
        for sample, inputs, targets in zip(samples, batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            assert bytes(targets[: len(sample)]) == sample
            assert bytes(inputs[: len(sample)]) == bytes([START]) + sample[:-1]
            assert set(targets[len(sample) :]) <= {IGNORE}

    def test_window_is_the_same_text_in_both_forms(self, corpus):
        """The micro-batches hold the big batch's samples, in a full and in a partial window."""
        for partial, count in ((False, 8), (True, 3)):
            window = corpus.window(3, partial)
            assert len(window.micro_batches) == count
            rows = [t[t != IGNORE].tolist() for batch in window.micro_batches for t in batch.targets]
            assert rows == [t[t != IGNORE].tolist() for t in window.big_batch.targets]
            assert sum(batch.tokens for batch in window.micro_batches) == window.big_batch.tokens

    def test_micro_batches_are_unequal(self, corpus):
        """Otherwise weighting with the number of bytes would show nothing."""
        tokens = [batch.tokens for batch in corpus.window(0).micro_batches]
        assert max(tokens) > 1.5 * min(tokens)

    def test_order_is_fixed(self):
        """The same seed gives the same windows, another seed others, and the text starts again when it ends."""
        first, second, other = (Corpus(8, 8, CPU, seed) for seed in (0, 0, 1))
        texts, again, others = (one.window(5).big_batch.targets.tolist() for one in (first, second, other))
        assert texts == again != others
        assert len(first.window(10**6).big_batch.targets) == 64

    def test_training_and_validation_do_not_share_files(self):
        """Validation text is held out."""
        from accumkernels.demo.gpt import TRAINING_FILES, VALIDATION_FILES

        assert not set(TRAINING_FILES) & set(VALIDATION_FILES)

    def test_missing_files(self, tmp_path, monkeypatch):
        """Files that are not there are left out; none at all is an error that names the directory."""
        (tmp_path / "a.py").write_bytes(
            b"import os\nimport sys\n\n\nx = 1\n\n" + b"y" * (2 * CONTEXT + SHORTEST) + b"\n"
        )
        monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
        samples = read_samples(["missing.py", "a.py"])
        assert samples == [b"import os\nimport sys", b"y" * CONTEXT, b"y" * CONTEXT, b"y" * SHORTEST]
        with pytest.raises(FileNotFoundError, match=str(tmp_path)):
            read_samples(["missing.py"])


@torch.no_grad()
def test_padding_does_not_matter(model):
    """A batch's loss is the mean over its real bytes: the same as from its samples one by one."""
    samples = [b"def f():", b"return None", b"x" * 40]
    each = [float(model(*_tensors(sample))) * len(sample) for sample in samples]
    batch = Batch.collate(samples, CPU)
    together = float(model(batch.inputs, batch.targets)) * batch.tokens
    assert together == pytest.approx(sum(each), rel=1e-5)  # fp32, other orders of summation


def _tensors(sample):
    targets = torch.tensor([list(sample)])
    return torch.cat([torch.full((1, 1), START), targets[:, :-1]], 1), targets


class TestTraining:
    """The three methods."""

    def test_exact_methods_agree(self, model, corpus):
        """Without autocast the big batch and FusedAccumulator take the same steps, in a partial window too."""
        big, fused = train.copied(train.BigBatch, model, None), train.copied(train.Fused, model, None)
        for index in range(3):
            window = corpus.window(index, partial=index == 2)
            assert float(train.train_window(big, window, 1e-3)) == pytest.approx(
                float(train.train_window(fused, window, 1e-3)), rel=1e-5
            )
        # Adam divides by the gradient's size: where that is rounding alone, a step may differ by the learning rate.
        for a, b in zip(big.model.parameters(), fused.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=3e-3)
            assert (a - b).abs().mean() < 1e-5

    def test_stock_is_right_on_equal_micro_batches(self, model):
        """The usual recipe's error is its weighting: with micro-batches of one size it is the big batch's gradient."""
        samples = [bytes(range(32 + i, 64 + i)) for i in range(16)]
        pieces = [Batch.collate(samples[start : start + 2], CPU) for start in range(0, 16, 2)]
        window = Window(Batch.collate(samples, CPU), pieces)
        for (error,) in train.gradient_errors(train.METHODS, model, window, (None,)):
            assert error < FP32_ERROR

    def test_repeatable(self, model, corpus):
        """The same weights and windows give the same losses, bit for bit."""
        runs = [
            train.train(
                [train.copied(cls, model, torch.bfloat16) for cls in train.METHODS], corpus, 2, lambda losses: None
            )
            for _ in range(2)
        ]
        assert [run.losses for run in runs[0]] == [run.losses for run in runs[1]]
        assert [run.final_loss for run in runs[0]] == [run.final_loss for run in runs[1]]

    def test_learning_rate(self):
        """It rises to its peak once, falls, and is positive."""
        rates = [train.learning_rate(step, 50) for step in range(50)]
        peak = rates.index(max(rates))
        assert max(rates) == pytest.approx(train.LEARNING_RATE)
        assert all(a < b for a, b in itertools.pairwise(rates[: peak + 1]))
        assert all(a >= b for a, b in itertools.pairwise(rates[peak:]))
        assert min(rates) > 0

    @pytest.mark.parametrize(
        ("windows", "shape", "steps"),
        [(1000, 0, 100), (50, 0, 50), (24, 0, 24), (20, 1, 24), (18, 2, 27), (12, 2, 18), (1, 2, 12)],
    )
    def test_choose_size(self, windows, shape, steps):
        """The largest model that can be trained with enough windows in the time; within bounds."""
        per_window = train.SECONDS / windows * 0.999  # of the largest
        assert train.choose_size(per_window * train.SHAPES[2].cost / train.SHAPES[0].cost) == (
            train.SHAPES[shape],
            steps,
        )

    def test_sizes(self):
        """25 to 50 million parameters, so that gradients matter; the largest first."""
        sizes = []
        for shape in train.SHAPES:
            with torch.device("meta"):
                sizes.append(sum(parameter.numel() for parameter in shape.build().parameters()))
        assert sizes == sorted(sizes, reverse=True)
        assert 25e6 <= sizes[-1] < sizes[0] <= 50e6

    def test_seconds_per_window(self, model, corpus):
        """It is measured on copies: the model gets no gradients."""
        assert train.seconds_per_window(model, corpus, torch.bfloat16) > 0
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_only_fp16_has_a_scaler(self, model, corpus):
        """As in a loop that people have; it steps with it, too."""
        assert not train.copied(train.Fused, model, torch.bfloat16).scaler.is_enabled()
        method = train.copied(train.Fused, model, torch.float16)
        before = next(method.model.parameters()).clone()
        train.train_window(method, corpus.window(0), 1e-3)
        assert method.scaler.get_scale() == train.INIT_SCALE
        assert not torch.equal(before, next(method.model.parameters()))


class TestReport:
    """What runs turn into, on numbers whose answer is known."""

    @staticmethod
    def runs():
        """Stock takes 2 s for each of three windows, we 1, 1.25 and, in the short one, 9."""
        stock = report.Run("stock", tokens=[100, 300, 10], step_seconds=[2.0, 2.0, 2.0])
        fused = report.Run("fused", tokens=[100, 300, 10], step_seconds=[1.0, 1.25, 9.0])
        return stock, fused

    def test_rates(self):
        """Medians over the full windows; speeds are compared window by window."""
        stock, fused = self.runs()
        assert stock.tokens_per_second == 100  # of 50 and 150
        assert report.speedup(fused, stock) == pytest.approx((2 + 1.6) / 2)
        one = report.Run("one", tokens=[100], step_seconds=[4.0])
        assert one.tokens_per_second == 25

    @pytest.mark.parametrize(
        ("error", "text"), [(1.234, "123 %"), (0.456, "46 %"), (0.0042, "0.42 %"), (3e-7, "3e-05 %")]
    )
    def test_percent(self, error, text):
        """Short, and no power of ten where it is large."""
        assert report.percent(error) == text

    @pytest.mark.parametrize(
        ("amp", "line"), [("bfloat16", "for (loss / K)"), ("float16", "for scaler.scale(loss / K)")]
    )
    def test_conclusion(self, amp, line):
        """It has this run's numbers, and a scaler where there was one."""
        stock, fused = self.runs()
        stock.gradient_errors, fused.gradient_errors = {"full": 0.2, "short": 0.75}, {"full": 0.004, "short": 0.003}
        text = io.StringIO()
        scaled = amp == "float16"
        console = Console(file=text, width=200)
        report.print_conclusion(console, stock, fused, "tokens", scaled=scaled, cache_casts=True, clips=True)
        for part in ("1.80 times", "0.4 %", "20 %", "0.3 %", "75 %", "cache_casts=True", line):
            assert part in text.getvalue()
        assert ("scaler=scaler" in text.getvalue()) == (amp == "float16")


class TestDisplay:
    """Progress on a terminal and in a log."""

    @staticmethod
    def show(terminal: bool) -> str:
        """What is printed for four windows and a measurement."""
        text = io.StringIO()
        display = Display(Console(file=text, force_terminal=terminal, width=100))
        with display:
            display.begin_training(NAMES, 4)
            for _ in range(4):
                display.trained(dict.fromkeys(NAMES, 2.5))
            display.begin_measuring(1)
            display.measured("memory")
        assert display.stage == "while measuring"
        return text.getvalue()

    def test_terminal(self):
        """A bar per method with its loss and the time left."""
        text = self.show(terminal=True)
        for part in (*NAMES, "4/4", "loss 2.500", "left", "measurements"):
            assert part in text

    def test_log(self):
        """A line per window (at most ten), without control characters."""
        lines = self.show(terminal=False).splitlines()
        assert [line.split(",")[0] for line in lines[:4]] == [f"window {i}/4" for i in (1, 2, 3, 4)]
        assert all(line.isprintable() for line in lines)


def test_default_device():
    """Without `--device` a GPU is taken where there is one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    assert command.choose_device(None).type == ("cpu" if found is None else found.type)
    assert command.choose_device("cpu") == CPU


def test_picture_shows_rates_and_errors(tmp_path, monkeypatch):
    """The bars are the table's numbers; the band is the seeds' extremes."""
    from matplotlib.figure import Figure

    from accumkernels.demo import report as picture

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    runs = [
        report.Run(name, [3.0, 1.0], [100, 100], [seconds] * 2, gradient_errors={"full": error / 10, "short": error})
        for name, seconds, error in zip(NAMES, (1.0, 4.0, 2.0), (0.004, 0.61, 0.005), strict=True)
    ]
    seeds = [runs[0], report.Run("seed", [4.0, 2.0]), report.Run("seed", [2.0, 1.5])]
    for run, megabytes in zip(runs, (300, 90, 80), strict=True):
        run.peak_bytes = megabytes * 10**6
    picture.draw(tmp_path / "picture.png", runs, "title", unit="tokens", batch="64 lines", budget=10**8, seeds=seeds)
    panels = {axes.get_ylabel(): axes for axes in figures[0].axes}
    rates, errors = panels["tokens per second"], panels["% of the exact gradient"]
    assert [bar.get_height() for bar in rates.patches] == [100, 25, 50]
    assert rates.get_title() == "2.00 times stock's speed"
    assert [bar.get_height() for bar in errors.patches] == pytest.approx([0.04, 0.4, 6.1, 61, 0.05, 0.5])
    assert " ".join(errors.get_title().split()) == "Its gradient is off by 0.5 %, stock's by up to 61 %"
    memory = panels["peak MB, 64 lines"]
    assert " ".join(memory.get_title().split()) == "Over the budget at once, below it in micro-batches"
    assert list(memory.lines[0].get_ydata()) == [100, 100]
    assert not any(axes.get_legend() for axes in figures[0].axes)
    (band,) = panels["training loss, nats per byte"].collections
    corners = {tuple(map(float, corner)) for corner in band.get_paths()[0].vertices}
    assert {(0.1, 2.0), (0.1, 4.0), (0.2, 1.75), (0.2, 3.0)} <= corners  # the last two are means of two windows


@pytest.mark.parametrize(
    ("name", "has_bf16", "found"),
    [(None, True, torch.bfloat16), (None, False, torch.float16), ("fp16", True, torch.float16), ("none", True, None)],
)
def test_default_autocast(name, has_bf16, found, monkeypatch):
    """bf16, but where a device is without it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0) if has_bf16 else (7, 5))
    assert command.choose_amp(name, torch.device("cuda")) == found
    seconds = {torch.float32: 1.0, torch.bfloat16: 0.5 if has_bf16 else 30.0}
    monkeypatch.setattr(command, "_seconds_of_product", seconds.get)
    assert command.choose_amp(None, CPU) == (torch.bfloat16 if has_bf16 else None)
