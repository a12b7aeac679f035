"""The benchmarks of memory: every tensor is put where it belongs, and the commands write what they say."""

import csv

import pytest
import torch

from benchmarks import buckets, memory, pictures
from benchmarks.harness import timeline
from benchmarks.harness.case import Case
from benchmarks.methods.training import METHODS, STOCK
from tests.benchmarks.test_benchmarks import command

CPU = torch.device("cpu")
LAYERS, WEIGHT = 6, 64 * 64  # of the model "tiny"
BY_NAME = {method.name: method for method in METHODS}


def peaks(name: str, **options: object) -> dict[str, int]:
    """Most bytes of each kind, of a method on the tiny model in bf16."""
    method = BY_NAME[name]
    method = method._replace(options={**method.options, **options})
    trained = memory.MODELS["tiny"]
    data = [trained.batch(CPU, torch.Generator().manual_seed(0)) for _ in range(2)]
    points = memory.record(method, trained, torch.bfloat16, CPU, data)
    return {kind: max(point[kind] for point in points) for kind in timeline.KINDS}


class TestTimeline:
    """Against counts by hand: six weights of 64 x 64, fp32 under autocast, or bf16 with masters."""

    def test_stock(self):
        """`.grad` is the accumulator; beside it, one gradient in 16 bit and widened. AdamW has two moments."""
        found = peaks(STOCK)
        assert found["gradients"] == WEIGHT * (2 + 4)
        assert found["accumulators"] == LAYERS * (WEIGHT + 64) * 4
        assert found["parameters"] == LAYERS * (WEIGHT + 64) * 4
        assert found["16-bit copies"] == LAYERS * WEIGHT * 2
        assert found["optimizer state"] == LAYERS * (WEIGHT + 64) * 2 * 4 + LAYERS * 2 * 4  # and a step count each

    @pytest.mark.parametrize("name", ['FusedAccumulator, release="microbatch"', "FusedAccumulator, masters"])
    @pytest.mark.native
    def test_all_gradients_live_at_once(self, name):
        """With `release="microbatch"`, in 16 bits."""
        assert peaks(name)["gradients"] == LAYERS * WEIGHT * 2

    @pytest.mark.parametrize("weights", [1, 2, 3])
    @pytest.mark.native
    def test_buckets_bound_gradients(self, weights):
        """With `release="backward"` a bucket's worth lives."""
        found = peaks('FusedAccumulator, release="backward"', bucket_bytes=weights * WEIGHT * 2)
        # Biases fill a bucket too: one of `weights` weights and their biases is full before its last bias.
        assert found["gradients"] == weights * WEIGHT * 2
        assert found["accumulators"] == LAYERS * (WEIGHT + 64) * 4

    def test_thinned_keeps_peaks(self):
        """Of each stretch the largest point."""
        points = [dict.fromkeys(timeline.KINDS, 0) | {"gradients": n} for n in (1, 5, 2, 0, 7, 7, 3)]
        assert [p["gradients"] for p in timeline.thinned(points, 3)] == [5, 7, 7]
        assert timeline.thinned(points, 7) == points


@pytest.mark.starts
def test_memory_command(tmp_path):
    """A row per method, and a picture from the timeline alone."""
    peaks_file, line = tmp_path / "memory.csv", tmp_path / "line.csv"
    said = command("memory", "--models", "tiny", "--csv", str(peaks_file), "--timeline", str(line))
    assert "FusedAccumulator" in said
    rows = list(csv.DictReader(peaks_file.open()))
    assert [row["method"] for row in rows] == [m.name for m in memory._methods()]
    assert rows[0]["peak_to_stock"] == "1.0"
    assert all(float(row["peak_MB"]) > float(row["accumulators_MB"]) for row in rows)
    (picture,) = pictures.draw(line, tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")


class TestBuckets:
    """What the benchmark of bucket sizes cuts and adds."""

    def test_cut(self):
        """A bucket closes as soon as it is full; none is empty."""
        case = Case([(4,), (4,), (8,), (1,)], torch.bfloat16, CPU)
        assert buckets.buckets(case, 1) == [[0], [1], [2], [3]]
        assert buckets.buckets(case, 12) == [[0, 1], [2], [3]]
        assert buckets.buckets(case, 1000) == [[0, 1, 2, 3]]

    @pytest.mark.native
    def test_add(self):
        """Every size adds the same."""
        sums = []
        for nbytes in (1, 40, 10**9):
            case = Case([(5,), (7, 3), (2,)], torch.float16, CPU)
            add, calls = buckets.prepare(case, nbytes)
            add()
            sums.append(torch.cat([view.flatten() for view in case.views]))
            assert calls == len(buckets.buckets(case, nbytes))
        expected = torch.cat([g.float().flatten() for g in case.grads])
        assert all(torch.equal(s, expected) for s in sums)

    @pytest.mark.starts
    def test_windows(self, tmp_path):
        """A row for stock, the default, whole micro-batches and each size."""
        out = tmp_path / "windows.csv"
        command("buckets", "--windows", "2x16", "--repetitions", "2", "--processes", "1", "--csv", str(out))
        rows = list(csv.DictReader(out.open()))
        assert [r["method"] for r in rows[:3]] == ["stock", "default", "whole micro-batches"]
        assert [float(r["bucket_MiB"]) * 2**20 for r in rows[3:]] == list(buckets.WINDOW_SIZES)
        assert rows[0]["ratio_to_stock"] == "1.0"

    @pytest.mark.parametrize(
        ("options", "said"), [(["2by16"], "'2by16'"), (["2x16", "--device", "cuda"], "--device cpu")]
    )
    def test_windows_that_cannot_be(self, options, said, capsys):
        """A model that is none, and a device whose pages are not the host's."""
        with pytest.raises(SystemExit):
            buckets.main(["--windows", *options])
        assert said in capsys.readouterr().err

    @pytest.mark.starts
    def test_command(self, tmp_path):
        """A row per size, the last for one call."""
        out = tmp_path / "buckets.csv"
        command("buckets", "--elements", "100000", "--repetitions", "2", "--csv", str(out))
        rows = list(csv.DictReader(out.open()))
        assert len(rows) == len(buckets.SIZES) + 1
        assert rows[-1]["bucket_MiB"] == ""
        assert (rows[-1]["calls"], rows[-1]["ratio_to_one_call"]) == ("1", "1.0")
