"""The benchmarks: every method does its job, the commands run and write what they say, pictures come from the CSV."""

import csv
import json
import os
import subprocess
import sys
from functools import partialmethod
from pathlib import Path

import pytest
import torch

from benchmarks import kernel_rows, link, pictures, ranks, training
from benchmarks.harness import machine, measure, results, shapes
from benchmarks.harness.case import DTYPES, LOSS_SCALE, Case
from benchmarks.kernel_jobs import COLD, WRITTEN, Job, Measured, merge, run
from benchmarks.methods import compute, host, limits, other_jobs, peers, window
from benchmarks.methods import link as emulated
from benchmarks.methods.training import METHODS, STOCK

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SHAPES = [(33, 7), (65,), (4, 3, 3, 3), (1,)]


def command(module: str, *arguments: str) -> str:
    """Run `python -m benchmarks.<module>`; its standard output."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def relative_error(actual, expected) -> float:
    """L2, over all tensors together, in fp64."""
    a = torch.cat([t.detach().double().flatten() for t in actual])
    e = torch.cat([t.detach().double().flatten() for t in expected])
    return ((a - e).norm() / e.norm()).item()


# Accumulators are fp32; a sum of three gradients is rounded at most once per addition.
TOLERANCE = 3 * 2.0**-24
# fp32 sums, norms and products of some 400 terms; the 1e-6 that clipping adds to a norm of 0.02 is 5e-5 of it.
WINDOW_TOLERANCE = 1e-4


def check_accumulate(name: str, dtype: str, device: torch.device) -> None:
    """See TestPeers.test_accumulate."""
    case = Case(SHAPES, DTYPES[dtype], device)
    method = peers.PEERS[name](case)
    method.whole()
    method.whole()
    if method.one is None:
        method.whole()
    else:
        for index in range(len(SHAPES)):
            method.one(index)
    truth = [3 * g.double() for g in case.written_from]
    assert relative_error(method.accumulators, truth) <= TOLERANCE
    assert all(a.dtype == torch.float32 for a in method.accumulators)


class TestPeers:
    """No peer is broken, and none is let off a part of the job."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        "name",
        [
            pytest.param(n, marks={peers.COMPILED: pytest.mark.starts, peers.OURS: pytest.mark.native}.get(n, ()))
            for n in peers.available(CPU, len(SHAPES))
        ],
    )
    def test_accumulate(self, name, dtype):
        """Three calls add three times the gradient, whole or parameter by parameter."""
        check_accumulate(name, dtype, CPU)

    @pytest.mark.parametrize("dtype", ["bf16", "fp16"])
    @pytest.mark.parametrize("name", [n for n in window.WINDOWS if n != peers.COMPILED])
    def test_window(self, name, dtype):
        """Two windows in a row end in the clipped gradient of each, whose micro-batches differ."""
        check_window(name, dtype, CPU)

    @pytest.mark.starts
    def test_compiled_window(self):
        """As above, once: compiling takes a while."""
        check_window(peers.COMPILED, "bf16", CPU)

    @pytest.mark.parametrize("name", [n for n in window.WINDOWS if n != peers.COMPILED])
    def test_window_checks_for_overflow(self, name):
        """An inf in one micro-batch is noticed: nothing finite is handed on as if nothing had been."""
        case = Case(SHAPES, torch.float16, CPU)
        method = window.WINDOWS[name](case)
        case.grads[1][3] = float("inf")
        method.accumulate()
        method.finish()
        assert not all(t.isfinite().all() for t in method.result())
        method.zero()
        case.write()
        method.accumulate()
        method.finish()
        assert all(t.isfinite().all() for t in method.result())  # and the next window is clean

    def test_gradients_are_written(self):
        """`write` restores what a micro-batch had."""
        case = Case(SHAPES, torch.float16, CPU)
        case.grads[0].zero_()
        case.write()
        assert all(torch.equal(g, s) for g, s in zip(case.grads, case.written_from, strict=True))

    def test_lossy_is_lossy(self):
        """Sums of 16 bits: the job apart really is another."""
        case = Case(SHAPES, torch.bfloat16, CPU)
        call = other_jobs.lossy(case, 1)
        for _ in range(3):
            call()
        (sums,) = [c.cell_contents for c in call.__closure__ if isinstance(c.cell_contents, list)]
        assert sums[0].dtype == torch.bfloat16
        assert 1e-4 < relative_error(sums, [3 * g.double() for g in case.grads]) < 1e-2


def check_window(name: str, dtype: str, device: torch.device) -> None:
    """See TestPeers.test_window."""
    case = Case(SHAPES, DTYPES[dtype], device)
    method = window.WINDOWS[name](case)
    for factors in ((1.0, 2.0, -0.5), (0.25, 1.0)):
        total = [torch.zeros_like(g, dtype=torch.float64) for g in case.grads]
        for factor in factors:
            for grad, source, summed in zip(case.grads, case.written_from, total, strict=True):
                grad.copy_(source.roll(int(factor * 4)) * factor)
                summed += grad.double()
            method.accumulate()
        method.finish()
        norm = torch.cat([t.flatten() for t in total]).norm()
        assert norm / LOSS_SCALE / len(factors) > window.MAX_NORM  # all clip
        truth = [t / norm * window.MAX_NORM for t in total]
        assert relative_error(method.result(), truth) <= WINDOW_TOLERANCE
        method.zero()


class TestParts:
    """What the commands are made of."""

    @pytest.mark.parametrize(
        ("name", "tensors", "elements"),
        [
            ("gpt2", 148, 124_439_808),
            ("llama1b", 146, 1_235_814_400),
            ("resnet50", 161, 25_557_032),
            ("tiny", 1500, 96_000),
        ],
    )
    def test_shapes(self, name, tensors, elements):
        """The models' own numbers."""
        (found,) = shapes.lists(name)
        assert (len(found), shapes.numel(found)) == (tensors, elements)

    @pytest.mark.parametrize("name", shapes.NAMES)
    def test_shapes_shrink(self, name):
        """Quick runs keep the tensors and lose elements."""
        for found in shapes.lists(name, 50_000):
            assert len(found) in (16, len(shapes.lists(name)[0]))
            assert shapes.numel(found) <= 500_000  # one row of each tensor is left
        assert len(shapes.lists("uniform")) == len(shapes.UNIFORM_SIZES)

    @pytest.mark.starts
    @pytest.mark.parametrize("dtype", ["bf16", "fp32"])
    def test_limits_move_memory(self, dtype):
        """The streaming loop really adds: fp32 bits as they are, 16 bits as integers."""
        case = Case([(1000,)], DTYPES[dtype], CPU)
        loops = limits.limits(case)
        assert set(loops) == set(limits.NAMES)
        loops[limits.STREAM].write()
        loops[limits.STREAM].call()
        assert bool((case.flat > 0).all())
        loops[limits.COPY].call()
        assert bool((case.flat == 1).all())

    def test_launches_are_counted(self):
        """A kernel per tensor; views and allocations are none."""
        case = Case(SHAPES, torch.float16, CPU)
        launches = {n: measure.count_launches(peers.PEERS[n](case).whole, CPU) for n in (peers.MIXED, peers.CAST)}
        assert launches == {peers.MIXED: len(SHAPES), peers.CAST: 2 * len(SHAPES)}
        assert measure.count_launches(peers.PEERS[peers.FOREACH](case).whole, CPU) == len(SHAPES)

    def test_matrices_of_a_step(self):
        """Vectors are no matrices, convolutions are."""
        assert compute.matrices([(3, 4), (7,), (3, 4), (5, 2, 3, 3)]) == {(3, 4): 2, (5, 18): 1}
        products, optimizer = compute.step_seconds(SHAPES, torch.bfloat16, 4, measure.Timer(CPU))
        assert products > 0 and optimizer > 0

    def test_median_and_spread(self):
        """Also of a single number."""
        assert measure.median_and_spread([float(i) for i in range(11)]) == (5.0, 1.0, 9.0)
        assert measure.median_and_spread([2.0]) == (2.0, 2.0, 2.0)

    def test_rows(self):
        """GB/s is of the job's bytes, fractions are of the fastest limit in the same state, ratios to ours."""
        ms = 1e-3
        measured = [
            Measured("accumulate", limits.COPY, COLD, 1, [2 * ms]),
            Measured("accumulate", limits.STREAM, COLD, 1, [2 * ms]),
            Measured("accumulate", limits.COPY, WRITTEN, 1, [1 * ms]),
            Measured("accumulate", peers.OURS, COLD, 1, [4 * ms]),
            Measured("accumulate", peers.CAST, COLD, 1, [8 * ms]),
            Measured("step", "matrix products of a micro-batch", "", 1, [12 * ms]),
            Measured("step", "fused AdamW", "", 1, [1 * ms]),
        ]
        rows = kernel_rows.rows(measured, "x", [(1000, 1000)], "fp16", {"torch": "t"}, 7)
        assert [row["GB_per_s"] for row in rows] == [4.0, 5.0, 8.0, 2.5, 1.25]
        assert [row["fraction_of_limit"] for row in rows[3:]] == [0.5, 0.25]
        assert [row["fraction_of_copy"] for row in rows[3:]] == [0.625, 0.312]
        assert [row["ratio_to_ours"] for row in rows[3:]] == [1.0, 2.0]
        assert [row["share_of_step"] for row in rows[3:]] == [0.25, 0.4]
        assert rows[3]["torch"] == "t"

    def test_other_jobs_have_no_ratio(self):
        """Nor bytes to be compared by."""
        measured = [Measured("other jobs", other_jobs.LOSSY, COLD, 1, [1e-3])]
        (row,) = kernel_rows.rows(measured, "x", SHAPES, "bf16", {}, 7)
        assert row["ms_median"] == 1.0
        assert row["ratio_to_ours"] is row["GB_per_s"] is row["fraction_of_limit"] is None

    def test_merge(self):
        """Processes of the same method count together."""
        parts = [Measured("window", "a", WRITTEN, k, [float(i)]) for i in range(2) for k in (2, 8)]
        assert [(m.micro_batches, m.seconds) for m in merge(parts)] == [(2, [0.0, 1.0]), (8, [0.0, 1.0])]

    @pytest.mark.native
    def test_host_time(self):
        """Every method, on few tensors."""
        job = Job("host", tuple(host.METHODS), host.shapes(5), "fp16", "cpu", 1, 2, 1.0)
        assert [(m.method, len(m.seconds)) for m in run(job)] == [(name, 2) for name in host.METHODS]

    def test_unavailable_is_said(self):
        """Where torch has no product that adds into fp32, the row says so."""
        job = Job("other jobs", (other_jobs.FUSED_PRODUCT,), SHAPES, "bf16", "cpu", 1, 1, 1.0, tokens=4)
        (measured,) = run(job)
        assert bool(measured.seconds) != bool(measured.unavailable)

    def test_commit(self, monkeypatch):
        """Without a history, what the environment says."""
        monkeypatch.setattr(machine, "git", lambda *arguments: "")
        monkeypatch.setenv("ACCUMKERNELS_COMMIT", "abc1234")
        assert machine.commit() == "abc1234"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory) -> Path:
    """A folder with the files of a run."""
    folder = tmp_path_factory.mktemp("kernels")
    quick = "--processes 0 --repetitions 2 --elements 16384 --tokens 8 --methods mixed,stock --dtype fp16"
    written = ["--csv", str(folder / "kernels.csv"), "--json", str(folder / "kernels.json")]
    (folder / "out.txt").write_text(
        command("kernels", *quick.split(), "--shapes", "uniform,resnet50", "--micro-batches", "2", *written)
    )
    return folder


@pytest.mark.starts
class TestCommands:
    """End to end at tiny sizes."""

    def test_files(self, kernels):
        """CSV and JSON hold the same rows with all columns; every row says what it was measured with."""
        rows = results.read_csv(kernels / "kernels.csv")
        in_json = json.loads((kernels / "kernels.json").read_text())
        assert list(rows[0]) == list(in_json[0]) == list(kernel_rows.COLUMNS)
        assert [r["ms_median"] for r in rows] == [
            "" if r["ms_median"] is None else str(r["ms_median"]) for r in in_json
        ]
        for row in in_json:
            assert row["device"] and row["torch"] == torch.__version__ and row["date"] and row["threads"] == 2
        assert {(r["table"], r["gradients"]) for r in rows} == {
            ("accumulate", "cold"),
            ("accumulate", "written"),
            ("window", "written"),
            ("host", ""),
            ("other jobs", "cold"),
        }
        assert {int(r["tensors"]) for r in rows if r["table"] == "host"} == {300, 3000}

    def test_methods(self, kernels):
        """Those asked for, ours, and the limits beside them."""
        rows = [r for r in results.read_csv(kernels / "kernels.csv") if r["shapes"] == "resnet50"]
        for table in ("accumulate", "window"):
            methods = {r["method"] for r in rows if r["table"] == table}
            assert methods == {*limits.NAMES, peers.OURS, peers.MIXED, peers.FOREACH, peers.STOCK}
            for row in rows:
                if row["table"] == table and row["method"] not in limits.NAMES:
                    assert row["fraction_of_limit"] and row["ratio_to_ours"] and row["share_of_step"]

    def test_tables(self, kernels):
        """Standard output has a table per question."""
        text = (kernels / "out.txt").read_text()
        for part in ("gradients cold", "gradients written", "window of 2", "host time", "other jobs, not peers"):
            assert part in text

    def test_pictures(self, kernels, tmp_path):
        """Drawn from the CSV alone."""
        drawn = command("pictures", str(kernels / "kernels.csv"), "--out", str(tmp_path)).split()
        assert sorted(Path(path).name for path in drawn) == [
            "kernels-accumulate.png",
            "kernels-size.png",
            "kernels-window.png",
        ]
        assert all((tmp_path / Path(path).name).read_bytes().startswith(b"\x89PNG") for path in drawn)

    def test_processes_of_their_own(self, tmp_path):
        """On the CPU each method has its own."""
        quick = "--processes 1 --repetitions 1 --elements 2000 --tokens 8 --methods none --dtype bf16 --shapes tiny"
        command("kernels", *quick.split(), "--tables", "accumulate", "--csv", str(tmp_path / "k.csv"))
        assert {r["method"] for r in results.read_csv(tmp_path / "k.csv")} == {*limits.NAMES, peers.OURS}

    def test_training(self, tmp_path):
        """Tokens per second and memory of every method there is, a reason for the others, and the picture."""
        file = tmp_path / "training.csv"
        command("training", *"--model tiny --windows 2 --micro-batches 1,2 --dtype fp16 --csv".split(), str(file))
        with file.open() as lines:
            rows = list(csv.DictReader(lines))
        assert [r["method"] for r in rows] == [m.name for m in METHODS] * 2
        assert [r["micro_batches"] for r in rows] == ["1"] * len(METHODS) + ["2"] * len(METHODS)
        for row in rows:
            assert bool(row["unavailable"]) != bool(row["tokens_per_second"]), row
            assert row["unavailable"] or float(row["peak_MB"]) > 0
        assert all(float(r["speed_to_stock"]) == 1 for r in rows if r["method"] == STOCK)
        assert [path.name for path in pictures.draw(file, tmp_path)] == ["training.png"]

    @pytest.mark.usefixtures("one_thread")
    def test_training_compiled(self, tmp_path, monkeypatch):
        """A graph for fp32 weights and one for 16 bits, which all methods share; memory is not counted on the CPU."""
        torch._dynamo.reset()
        monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="eager"))
        file = tmp_path / "compiled.csv"
        options = "--model tiny --windows 1 --micro-batches 2 --dtype bf16 --threads 1 --compile --methods masters"
        assert training.main([*options.split(), "--csv", str(file)]) == 0
        rows = [row for row in results.read_csv(file) if not row["unavailable"]]
        assert [row["method"] for row in rows[:2]] == [STOCK, "FusedAccumulator, masters"]
        assert [row["graphs"] for row in rows] == ["1", "1", "0"]
        for row in rows:
            assert (row["model"], row["peak_MB"]) == ("tiny, torch.compile", "")
            assert float(row["tokens_per_second"]) > 0

    def test_wrong_arguments(self):
        """Named, with what there is."""
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.kernels", "--shapes", "gpt5"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 2
        assert "'gpt5' is not one of gpt2, llama1b, resnet50, tiny, uniform" in done.stderr


if torch.cuda.is_available():
    CUDA = torch.device("cuda", 0)

    @pytest.mark.gpu
    class TestOnGpu:
        """The same methods on a GPU."""

        @pytest.mark.parametrize("dtype", DTYPES)
        @pytest.mark.parametrize("name", peers.available(CUDA, len(SHAPES)))
        def test_accumulate(self, name, dtype):
            """As on the CPU."""
            check_accumulate(name, dtype, CUDA)

        @pytest.mark.parametrize("dtype", ["bf16", "fp16"])
        @pytest.mark.parametrize("name", window.WINDOWS)
        def test_window(self, name, dtype):
            """As on the CPU."""
            check_window(name, dtype, CUDA)

        def test_measured(self):
            """Events give times, the limits are there, and kernels are counted where the profiler works."""
            names = (peers.OURS, peers.MIXED)
            measured = run(Job("accumulate", names, [(4096, 64)] * 3, "fp16", "cuda", 2, 3, 5.0))
            assert {m.method for m in measured} == {*limits.NAMES, *names}
            assert all(s > 0 for m in measured for s in m.seconds)
            assert {m.launches for m in measured if m.method == peers.MIXED} <= {3, None}

        def test_commands(self, tmp_path):
            """Both, at small sizes."""
            quick = "--elements 100000 --repetitions 2 --tokens 64 --methods mixed --dtype fp16 --shapes resnet50"
            command("kernels", "--device", "cuda", *quick.split(), "--csv", str(tmp_path / "kernels.csv"))
            train = "--device cuda --model tiny --windows 2 --micro-batches 2 --dtype fp16 --csv"
            command("training", *train.split(), str(tmp_path / "training.csv"))
            assert len(pictures.draw(tmp_path / "kernels.csv", tmp_path)) == 2
            assert len(pictures.draw(tmp_path / "training.csv", tmp_path)) == 1


@pytest.mark.starts
def test_link(tmp_path):
    """On two gloo ranks, over an emulated link, a row for every method and number of micro-batches."""
    path = tmp_path / "link.csv"
    short = ["--host", "runs ahead", "--micro-batches", "1,2", "--reduction", "0.5", "--windows", "2"]
    assert link.main([*short, "--csv", str(path)]) == 0
    with path.open() as lines:
        rows = list(csv.DictReader(lines))
    assert [(row["host"], row["micro_batches"], row["method"]) for row in rows] == [
        ("runs ahead", count, name) for count in ("1", "2") for name in link.METHODS
    ]


@pytest.mark.parametrize("ahead", [False, True])
def test_emulated_device(ahead, monkeypatch):
    """It computes one thing after the other, from when it is asked; the host waits for each, or at the end."""
    clock, slept = [0.0], []

    def sleep(seconds):
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(emulated.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(emulated.time, "sleep", sleep)
    device = emulated.Device(ahead)
    device.compute(2.0)
    device.compute(3.0)
    assert device.done() == 5
    assert slept == ([] if ahead else [2, 3])
    device.wait()
    assert clock == [5]
    clock[0] = 10.0
    device.compute(1.0)
    assert device.done() == 11


def test_link_refuses_hosts(capsys):
    """By name, before anything runs."""
    with pytest.raises(SystemExit):
        link.main(["--host", "sleeps"])
    assert "--host must be of waits, runs ahead, got 'sleeps'" in capsys.readouterr().err


@pytest.mark.starts
def test_ranks(tmp_path):
    """On two gloo ranks all methods train alike, and silence in micro-batches shows in the bytes."""
    path = tmp_path / "ranks.csv"
    out = command(
        "ranks", "--ranks", "2", "--model", "tiny", "--micro-batches", "3", "--windows", "2", "--csv", str(path)
    )
    assert "2 ranks (gloo), tiny" in out
    rows = {row["method"]: row for row in results.read_csv(path)}
    assert set(rows) == set(ranks.METHODS)
    assert tuple(next(iter(rows.values()))) == ranks.COLUMNS
    for name, row in rows.items():
        # bf16 rounds each of two terms and their sum; what is fp32 differs by rounding alone.
        assert float(row["difference"]) < (2e-2 if "bf" in name else 1e-5), name
    if ranks._sent() is not None:
        often, once = (float(rows[name]["sent_MB"]) for name in ("DDP, every micro-batch", "FusedAccumulator"))
        assert once < 0.6 * often


@pytest.mark.starts
def test_bytes_of_ranks(tmp_path):
    """Without timed windows: DistributedDataParallel's buckets are one copy of the gradients, and shards are less."""
    path = tmp_path / "ranks.csv"
    command("ranks", "--ranks", "2", "--micro-batches", "1", "--windows", "0", "--csv", str(path))
    rows = {row["method"]: row for row in results.read_csv(path)}
    copy = 4e-6 * int(rows["FusedAccumulator"]["parameters"])
    held = {name: float(row["held_MB"]) / copy for name, row in rows.items()}
    assert all(row["ms_median"] == "" for row in rows.values())
    # In copies: parameters, sums or buckets, momentum; beside them a few hundred kB that are in no tensor.
    for name, copies in (
        ("DDP, no_sync", 3),
        ("FusedAccumulator", 3),
        ("FusedAccumulator(DistributedDataParallel)", 4),
        ("FusedAccumulator, ZeroRedundancyOptimizer", 2.5),
        ("FusedAccumulator, FSDP2", 1.5),
    ):
        assert copies - 0.01 < held[name] < copies + 0.45, (name, held[name])
