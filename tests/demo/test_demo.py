"""`python -m accumkernels demo`: what it writes, what it measures, and how it ends when something is wrong."""

from __future__ import annotations

import io
import itertools
import json
import os
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
from accumkernels.demo import clock, command, measure, methods, train
from accumkernels.demo.data import (
    CONTEXT,
    IGNORE,
    PADDING_STEP,
    SHORTEST,
    START,
    Batch,
    BatchWindow,
    Corpus,
    read_samples,
)
from accumkernels.demo.display import Display
from accumkernels.demo.model import GPT

NAMES = ["big batch", "stock accumulation", "FusedAccumulator"]
CPU = torch.device("cpu")
# fp32 arithmetic against fp64: sums over some 1,000 terms that round to 2**-24 = 6e-8 each.
FP32_ERROR = 1e-5


def start(*arguments: object, cwd: Path) -> subprocess.Popen[str]:
    """The demo in a process of its own, in a directory of its own, with output as in a log."""
    root = Path(accumkernels.__file__).parents[1]
    return subprocess.Popen(
        [sys.executable, "-m", "accumkernels", "demo", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(root), "COLUMNS": "80"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """As the demo itself: models this small only wait for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(command.THREADS)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """Three windows from the command line: the directory, and standard output."""
    directory = tmp_path_factory.mktemp("demo")
    process = start("--steps", 3, "--device", "cpu", cwd=directory)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return directory, out


@pytest.fixture(scope="module")
def corpus():
    """Windows of 8 micro-batches of 2 samples, the number that stock accumulation divides by."""
    return Corpus(2, methods.ACCUMULATION_STEPS, CPU)


@pytest.fixture(scope="module")
def model():
    """The demo's model with random weights."""
    torch.manual_seed(0)
    return GPT()


class TestCommand:
    """The whole demo, run from the command line."""

    @pytest.mark.starts
    def test_json(self, short_run):
        """`demo.json` has the three runs with their names, times and losses, one loss per window."""
        found = json.loads((short_run[0] / "demo" / "demo.json").read_text())
        assert [run["name"] for run in found["runs"]] == NAMES
        for run in found["runs"]:
            assert run["seconds"] > 0
            assert len(run["losses"]) == 3
            assert all(0 < loss < 6 for loss in [run["final_loss"], *run["losses"]])  # log(256) = 5.5 knows nothing
        assert found["settings"]["steps"] == 3

    @pytest.mark.starts
    def test_fused_ends_like_the_big_batch(self, short_run):
        """The final losses differ by less than 2 %, the window losses by less than bf16's rounding, 1 %."""
        big, _, fused = json.loads((short_run[0] / "demo" / "demo.json").read_text())["runs"]
        assert fused["final_loss"] == pytest.approx(big["final_loss"], rel=0.02)
        assert fused["losses"] == pytest.approx(big["losses"], rel=0.01)

    @pytest.mark.starts
    def test_measurements(self, short_run):
        """Stock is off by its unequal micro-batches, FusedAccumulator is not; the big batch takes the most memory."""
        runs = json.loads((short_run[0] / "demo" / "demo.json").read_text())["runs"]
        big, stock, fused = runs
        for window in ("full", "last"):
            assert fused["gradient_errors_without_autocast"][window] < FP32_ERROR
            assert big["gradient_errors_without_autocast"][window] < FP32_ERROR
            assert stock["gradient_errors_without_autocast"][window] > 100 * FP32_ERROR
        assert stock["gradient_errors"]["last"] > 0.4  # 3 of 8 micro-batches, divided by 8
        assert fused["gradient_errors"]["last"] < 0.05  # rounding to bf16's 8 bits
        assert big["peak_bytes"] > 1.3 * max(stock["peak_bytes"], fused["peak_bytes"])  # of which weights are the most
        assert all(0 < run["gradient_seconds_per_window"] < run["seconds"] for run in runs)

    @pytest.mark.starts
    def test_picture(self, short_run):
        """`demo.png` is a PNG of at least 400 x 250 pixels."""
        head = (short_run[0] / "demo" / "demo.png").read_bytes()[:24]
        assert head.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", head[16:])
        assert width >= 400
        assert height >= 250

    @pytest.mark.starts
    def test_table(self, short_run):
        """The output names every method and every measure, and is plain text in a log."""
        out = short_run[1]
        rows = [line.strip() for line in out.splitlines()]
        for name in NAMES:
            assert any(row.startswith(name) for row in rows)
        for measure_name in (
            "final validation loss",
            "gradient error against the big batch in float64",
            "time in gradient handling",
            "step time",
            "peak memory",
        ):
            assert measure_name in out
        assert "\x1b" not in out
        assert "window 3/3" in out

    @pytest.mark.starts
    def test_ctrl_c(self, tmp_path):
        """SIGINT ends it with one line, status 130 and no file."""
        process = start("--steps", 500, "--device", "cpu", "--out", "here", cwd=tmp_path)
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
        assert "file" in capsys.readouterr().err.splitlines()[0]

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
        assert first.window(5).samples == second.window(5).samples != other.window(5).samples
        assert len(first.window(10**6).samples) == 64

    def test_training_and_validation_do_not_share_files(self):
        """Validation text is held out."""
        from accumkernels.demo.data import TRAINING_FILES, VALIDATION_FILES

        assert not set(TRAINING_FILES) & set(VALIDATION_FILES)

    def test_missing_files(self, tmp_path):
        """Files that are not there are left out; none at all is an error that names the directory."""
        (tmp_path / "a.py").write_bytes(
            b"import os\nimport sys\n\n\nx = 1\n\n" + b"y" * (2 * CONTEXT + SHORTEST) + b"\n"
        )
        samples = read_samples(["missing.py", "a.py"], tmp_path)
        assert samples == [b"import os\nimport sys", b"y" * CONTEXT, b"y" * CONTEXT, b"y" * SHORTEST]
        with pytest.raises(FileNotFoundError, match=str(tmp_path)):
            read_samples(["missing.py"], tmp_path)


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
        big, fused = methods.BigBatch(model, None), methods.Fused(model, None)
        for index in range(3):
            window = corpus.window(index, partial=index == 2)
            assert float(big.train(window, 1e-3)) == pytest.approx(float(fused.train(window, 1e-3)), rel=1e-5)
        # Adam divides by the gradient's size: where that is rounding alone, a step may differ by the learning rate.
        for a, b in zip(big.model.parameters(), fused.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=3e-3)
            assert (a - b).abs().mean() < 1e-5

    def test_stock_is_right_on_equal_micro_batches(self, model):
        """The usual recipe's error is its weighting: with micro-batches of one size it is the big batch's gradient."""
        window = BatchWindow([bytes(range(32 + i, 64 + i)) for i in range(16)], 2, CPU)
        for (error,) in measure.gradient_errors(methods.METHODS, model, window, (None,)):
            assert error < FP32_ERROR

    def test_repeatable(self, model, corpus):
        """The same weights and windows give the same losses, bit for bit."""
        runs = [
            train.train([cls(model, torch.bfloat16) for cls in methods.METHODS], corpus, 2, lambda losses: None)
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
        ("seconds", "size"),
        [
            (1e-5, (4, 80)),
            (train.SECONDS / 96 / 50, (4, 50)),  # a window three ways is 96 samples
            (train.SECONDS / 96 / 20, (2, 40)),
            (1.0, (2, 30)),
        ],
    )
    def test_choose_size(self, seconds, size):
        """As many windows as fit into the time; where these are few, smaller ones; within bounds."""
        assert train.choose_size(seconds * 0.999) == size

    def test_seconds_per_sample(self, model, corpus):
        """It is measured on a copy: the model gets no gradients."""
        assert train.seconds_per_sample(model, corpus.window(0).micro_batches[0], torch.bfloat16) > 0
        assert all(parameter.grad is None for parameter in model.parameters())


class TestMeasures:
    """The instruments, on cases whose answer is known."""

    def test_clock(self, monkeypatch):
        """It adds up what is inside, only while it runs."""
        ticks = itertools.count()
        monkeypatch.setattr(clock.time, "perf_counter", lambda: float(next(ticks)))
        watch = clock.Clock(CPU)
        with watch:
            pass
        assert watch.seconds == 0
        watch.running = True
        for _ in range(3):
            with watch:
                pass
        assert watch.seconds == 3

    def test_gradient_time_leaves_out_forward_and_optimizer(self, model, corpus, monkeypatch):
        """With a clock that counts its readings: one interval per parameter, and one at the end of a backward."""
        ticks = itertools.count()
        monkeypatch.setattr(clock.time, "perf_counter", lambda: float(next(ticks)))
        window = corpus.window(0)
        found = measure.gradient_seconds([cls(model, None) for cls in methods.METHODS], [window])
        parameters = len(list(model.parameters()))
        # Before and after the optimizer's step the end of a window is one interval each.
        assert found == [parameters + 1 + 2, 8 * (parameters + 1) + 2, 8 * (parameters + 1) + 2]

    def test_gradient_time_counts_casts(self, model, corpus, monkeypatch):
        """Under autocast it has an interval for the cast of each linear parameter, and for what replaces casts."""
        trained = [cls(model, torch.bfloat16) for cls in methods.METHODS]
        for method in trained:
            method.train(corpus.window(0), 0.0)  # in which the accumulator finds out what autocast casts
        ticks = itertools.count()
        monkeypatch.setattr(clock.time, "perf_counter", lambda: float(next(ticks)))
        found = measure.gradient_seconds(trained, [corpus.window(1)])
        parameters, casts = len(list(model.parameters())), 2 * 2 * 4 + 1  # weight and bias of 4 layers, and the head's
        stock = parameters + casts + 1
        assert found == [stock + 2, 8 * stock + 2, 8 * (parameters + 1 + 1) + 2]

    def test_measuring_trains_nothing(self, model, corpus):
        """Timed windows leave the weights, and take their hooks off."""
        method = methods.Fused(model, None)
        measure.gradient_seconds([method], [corpus.window(0)])
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), method.model.parameters(), strict=True))
        assert not method.clock.running
        assert not method.optimizer._optimizer_step_pre_hooks


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
            display.measured()
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
    assert command.choose_device(None).type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert command.choose_device("cpu") == CPU


def test_picture_shows_the_error_in_the_last_window(tmp_path, monkeypatch):
    """One bar per method, in percent, as in the table."""
    from matplotlib.figure import Figure

    from accumkernels.demo import picture
    from accumkernels.demo.report import Run

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: figures.append(figure))
    runs = [
        Run(name, [1.0, 0.5], gradient_errors={"last": e}) for name, e in zip(NAMES, (0.004, 0.61, 0.005), strict=True)
    ]
    picture.draw(tmp_path / "picture.png", runs, "title")
    (panel,) = [axes for axes in figures[0].axes if "short last window" in axes.get_title()]
    assert [bar.get_height() for bar in panel.patches] == pytest.approx([0.4, 61.0, 0.5])
