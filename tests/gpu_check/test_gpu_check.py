"""tools/gpu_check: nothing that was measured is lost, nothing cancels what follows, and every command line is valid."""

import argparse
import contextlib
import importlib
import io
import json
import os
import select
import signal
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from benchmarks import kernels
from benchmarks.harness import machine as benchmarks_machine
from tools.gpu_check import __main__, archive, machine, ncu, runner, stages, summary
from tools.gpu_check.parts import CUT, FAILED, LEFT_OUT, NOT_RUN, PASSED, Outcome, Part

pytestmark = pytest.mark.starts

ROOT = Path(__file__).resolve().parents[2]
NEVER = "import signal; signal.pause()"


def python(name: str, code: str, *arguments: str, **fields) -> Part:
    """A part that is a few lines of Python."""
    return Part(name, [sys.executable, "-c", code, *arguments], fields.pop("seconds", 60), **fields)


def run(parts: list[Part], folder: Path, seconds: float = 60) -> dict[str, Outcome]:
    """Outcomes by name."""
    found = runner.run(parts, folder, os.environ, seconds, runner.Stop(), lambda outcomes: None)
    return {outcome.name: outcome for outcome in found}


def members(path: Path) -> dict[str, bytes]:
    """What an archive holds."""
    with tarfile.open(path) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar.getmembers()}


class TestRunner:
    """Parts, one after the other."""

    def test_a_failing_part_does_not_cancel_others(self, tmp_path):
        """Neither does a program that is not there, nor a log that nobody understands."""

        def confused(log):
            raise ValueError("no table")

        found = run(
            [
                python("a", "print('FAILED tests/x.py::y - boom'); print('end'); raise SystemExit(3)"),
                Part("b", ["/no/such/program"], 60),
                python("c", "pass", then=confused),
                python("d", "pass", missing=lambda: "not installed"),
                python("e", "print('fine')"),
            ],
            tmp_path,
        )
        assert [o.status for o in found.values()] == [FAILED, FAILED, FAILED, LEFT_OUT, PASSED]
        assert found["a"].why == "FAILED tests/x.py::y"
        assert "no table" in found["c"].why and found["d"].why == "not installed"
        assert (tmp_path / "e.log").read_text() == "fine\n"
        lines = [json.loads(line) for line in (tmp_path / "outcomes.jsonl").read_text().splitlines()]
        assert [line["name"] for line in lines] == list(found)

    def test_a_part_that_takes_too_long_is_cut(self, tmp_path):
        """And the next one runs."""
        found = run([python("long", NEVER, seconds=0.5), python("next", "pass")], tmp_path)
        assert (found["long"].status, found["next"].status) == (CUT, PASSED)
        assert "longer than 0 s" in found["long"].why

    def test_nothing_is_left_behind(self, tmp_path):
        """A process that a part has started, and that will not end, ends with it."""
        held = tmp_path / "held"
        os.mkfifo(held)
        child = f"""
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
held = open({str(held)!r}, "w")
print("here", file=held, flush=True)
signal.pause()
"""
        code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
        stop = runner.Stop()
        readers = []

        def wait():
            readers.append(held.open())
            assert readers[0].readline() == "here\n"
            stop.signal = signal.SIGTERM

        waiting = threading.Thread(target=wait)
        waiting.start()
        (outcome,) = runner.run([python("a", code)], tmp_path, os.environ, 60, stop, lambda outcomes: None)
        waiting.join()
        assert (outcome.status, outcome.why) == (CUT, "stopped by SIGTERM")
        ended, _, _ = select.select([readers[0]], [], [], 30)
        assert ended and readers[0].read() == ""  # nobody has it open any more
        readers[0].close()

    def test_no_part_begins_without_time(self, tmp_path):
        """It is listed as not run."""
        found = run([python("a", NEVER)], tmp_path, seconds=1.0)
        assert (found["a"].status, found["a"].why) == (NOT_RUN, "no time was left")

    def test_saves_while_a_part_runs(self, tmp_path, monkeypatch):
        """A kill without warning loses seconds, not the part."""
        monkeypatch.setattr(runner, "_SAVE_EVERY", 0.0)
        seen = []

        def save(outcomes):
            seen.append((tmp_path / "a.log").exists())

        runner.run([python("a", NEVER, seconds=1.0)], tmp_path, os.environ, 60, runner.Stop(), save)
        assert len(seen) > 1 and all(seen)


DRIVER = """
import sys
from pathlib import Path
from tools.gpu_check import __main__, machine, stages
from tools.gpu_check.parts import Part

fifo, code = sys.argv[1:3]

def parts(setting):
    first = [sys.executable, "-c", "print('first')"]
    second = [sys.executable, "-c", code, str(setting.folder / "rows.csv"), fifo]
    return [Part("first", first, 60), Part("second", second, 60), Part("third", first, 60)]

stages.STAGES[1] = parts
machine.describe = lambda python: {"gpus": 0, "torch": "2.0", "device": None, "capability": None}
sys.exit(__main__.main(["--stage", "1", "--rehearse", *sys.argv[3:]]))
"""
WRITES_AND_WAITS = """
import os, signal, sys
with open(sys.argv[1], "w") as file:
    file.write("commit\\n" + os.environ.get("ACCUMKERNELS_COMMIT", "not set") + "\\n")
open(sys.argv[2], "w").write(str(os.getpid()))
signal.pause()
"""


@pytest.fixture
def stage(tmp_path):
    """A stage whose second part has written a row and waits for ever."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    home = tmp_path / "home"
    environment = {**os.environ, "OUT": str(home), "ACCUMKERNELS_COMMIT": "abc1234"}
    command = [sys.executable, "-c", DRIVER, str(fifo), WRITES_AND_WAITS, "--folder", str(tmp_path / "work")]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    part = int(fifo.read_text())
    yield process, home
    process.kill()
    process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.kill(part, signal.SIGKILL)  # which nobody could end where the stage itself was killed


class TestCut:
    """A stage that ends before its time."""

    def test_sigterm(self, stage):
        """The archive has what was measured and the summary says what is missing; exit status as for the signal."""
        process, home = stage
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
        found = members(home / "gpu-check-stage1.tar.gz")
        assert found["stage1/rows.csv"] == b"commit\nabc1234\n"
        assert found["stage1/first.log"] == b"first\n"
        assert json.loads(found["stage1/machine.json"])["commit"] == "abc1234"
        text = (home / "gpu-check-stage1.txt").read_text()
        assert found["stage1/summary.txt"].decode() == text
        assert text in printed
        for line in ("second cut", "third not run", "stopped by SIGTERM", "PARTS=second", "commit abc1234"):
            assert line in " ".join(text.split())
        assert sorted(path.name for path in home.iterdir()) == ["gpu-check-stage1.tar.gz", "gpu-check-stage1.txt"]

    def test_sigkill(self, stage):
        """What was packed after the part before is whole."""
        process, home = stage
        process.kill()
        process.wait()
        found = members(home / "gpu-check-stage1.tar.gz")
        assert found["stage1/first.log"] == b"first\n"


class TestCommit:
    """It is never empty and never "None"."""

    @pytest.mark.parametrize("given", ["", "  ", "None", "null", "unknown"])
    def test_nothing_given(self, given, tmp_path):
        """A copy without its history, and a variable that another program filled from nothing."""
        assert machine.commit(tmp_path, {"ACCUMKERNELS_COMMIT": given}) == "unknown"
        assert machine.commit(tmp_path, {}) == "unknown"

    def test_given(self, tmp_path):
        """As it is."""
        assert machine.commit(tmp_path, {"ACCUMKERNELS_COMMIT": " abc1234\n"}) == "abc1234"

    def test_in_a_repository(self, tmp_path):
        """What git says."""
        git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "a"], check=True)
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        assert machine.commit(tmp_path, {}) == head.stdout.strip()

    def test_rows_of_benchmarks(self, monkeypatch):
        """A library that was built without its history does not say "None" either."""
        monkeypatch.setattr(benchmarks_machine, "git", lambda *arguments: "")
        monkeypatch.delenv("ACCUMKERNELS_COMMIT", raising=False)
        monkeypatch.setattr(benchmarks_machine.native, "build_info", lambda: {"commit": None})
        assert benchmarks_machine.commit() == "unknown"
        monkeypatch.setattr(benchmarks_machine.native, "build_info", lambda: {"commit": "def5678"})
        assert benchmarks_machine.commit() == "def5678"

    def test_parts_do_not_see_a_wrong_one(self, tmp_path, monkeypatch):
        """The variable is taken away where it holds no commit."""
        monkeypatch.setenv("ACCUMKERNELS_COMMIT", "None")
        monkeypatch.delenv("OUT", raising=False)
        code = "import os; print(os.environ.get('ACCUMKERNELS_COMMIT', 'not set'))"
        monkeypatch.setitem(stages.STAGES, 1, lambda setting: [python("a", code)])
        arguments = __main__.parse(["--rehearse", "--folder", str(tmp_path)])
        about = {"commit": machine.commit(tmp_path), "gpus": 0, "torch": "2.0"}
        __main__.check(1, arguments, about, runner.Stop())
        assert (tmp_path / "stage1" / "a.log").read_text() == "not set\n"
        text = (tmp_path / "gpu-check-stage1.txt").read_text()
        assert "commit unknown" in text and "ACCUMKERNELS_COMMIT=" in text and "None" not in text


@pytest.mark.parametrize(("code", "status"), [("pass", 0), ("raise SystemExit(3)", 1)])
def test_exit_status(code, status, tmp_path, monkeypatch):
    """Not 0 when a part failed: a rehearsal in CI is a check."""
    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(machine, "describe", lambda python: {"gpus": 0, "torch": "2.0"})
    monkeypatch.setattr(runner.Stop, "listen", lambda self: None)
    monkeypatch.setitem(stages.STAGES, 1, lambda setting: [python("a", code), python("b", "pass")])
    assert __main__.main(["--stage", "1", "--rehearse", "--folder", str(tmp_path)]) == status


class TestArchive:
    """What comes home."""

    def test_stays_under_its_limit(self, tmp_path):
        """Results first; what does not fit is named."""
        folder = tmp_path / "stage1"
        folder.mkdir()
        (folder / "a.csv").write_text("x\n1\n")
        (folder / "b.png").write_bytes(os.urandom(50_000))
        (folder / "c.bin").write_bytes(os.urandom(60_000))
        (folder / "small.bin").write_bytes(os.urandom(10_000))
        path = tmp_path / "out" / "a.tar.gz"
        assert archive.pack(folder, path, 100_000) == ["stage1/c.bin"]
        assert path.stat().st_size <= 100_000
        assert set(members(path)) == {"stage1/a.csv", "stage1/b.png", "stage1/small.bin"}
        assert archive.LIMIT <= 16 * 10**6

    @pytest.mark.parametrize("count", [1, 300])
    def test_many_small_files_count_too(self, count, tmp_path):
        """Headers are not free."""
        folder = tmp_path / "stage1"
        folder.mkdir()
        for number in range(count):
            (folder / f"{number}.bin").write_bytes(os.urandom(300))
        path = tmp_path / "a.tar.gz"
        archive.pack(folder, path, 60_000)
        assert path.stat().st_size <= 60_000

    def test_long_logs_are_shortened(self):
        """Their beginning and their end stay."""
        short = archive.shortened(b"begin" + b"x" * 10_000 + b"end", 1000)
        assert short.startswith(b"begin") and short.endswith(b"end") and b"9008 bytes left out" in short
        assert archive.shortened(b"abc", 1000) == b"abc"

    def test_replaces_the_one_before_at_once(self, tmp_path):
        """A file that fails to be read leaves the archive as it was."""
        folder = tmp_path / "stage1"
        folder.mkdir()
        (folder / "a.csv").write_text("1")
        path = tmp_path / "a.tar.gz"
        archive.pack(folder, path)
        before = path.read_bytes()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(io, "BytesIO", lambda data: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                archive.pack(folder, path)
        assert path.read_bytes() == before


class Parsed(Exception):
    """A command line was understood."""


@pytest.fixture
def setting(tmp_path):
    """As on a machine with two GPUs, where nothing optional is installed."""
    environment = {"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path)}
    return stages.Setting(sys.executable, False, "9.0", 2, tmp_path, environment)


def benchmark_parts(setting) -> list[Part]:
    """All parts that run a command of benchmarks/."""
    parts = [part for make in stages.STAGES.values() for part in make(setting)]
    return [p for p in parts if p.command[1:2] == ["-m"] and p.command[2].startswith("benchmarks.")]


class TestStages:
    """What they run."""

    @pytest.mark.parametrize("rehearse", [False, True])
    def test_benchmarks_know_their_options(self, rehearse, setting, monkeypatch):
        """Of every command line, on a GPU and in a rehearsal: an hour on a GPU is no time to find a typing error."""
        real = argparse.ArgumentParser.parse_args

        def parse(self, *arguments):
            real(self, *arguments)
            raise Parsed

        setting = stages.dataclasses.replace(setting, rehearse=rehearse)
        parts = benchmark_parts(setting)
        assert len(parts) > 15
        for part in parts:
            name, arguments = part.command[2].rpartition(".")[2], list(part.command[3:])
            if name == "kernels":
                assert kernels.parse(arguments).device == setting.device
            command = importlib.import_module(f"benchmarks.{name}")
            with monkeypatch.context() as patch, pytest.raises(Parsed):
                patch.setattr(argparse.ArgumentParser, "parse_args", parse)
                command.main(arguments)

    def test_builds_for_this_gpu_alone(self, setting):
        """In each stage, before what needs it; the program without torch too, which is the first of all."""
        for make in stages.STAGES.values():
            (build,) = [part for part in make(setting) if part.name == "build"]
            assert build.environment == {"ACCUMKERNELS_BUILD_CUDA": "1", "ACCUMKERNELS_CUDA_ARCHS": "9.0"}
        first, *others = [part.name for part in stages.first(setting)]
        assert first == "device-build" and others[:2] == ["device-check", "device-time"]
        assert "ARCH=sm_90" in stages.first(setting)[0].command

    def test_only_files_with_gpu_tests_are_collected(self, setting):
        """Another may need a package that the machine does not have, and pytest would run nothing at all."""
        (part,) = [p for p in stages.first(setting) if p.name == "tests"]
        files = {Path(a).name for a in part.command if a.endswith(".py")}
        assert {"test_cuda_graph.py", "test_buckets.py"} < files
        assert not {"test_demo.py", "test_structure.py", "test_gpu_check.py"} & files

    def test_parts_have_names_of_their_own(self, setting):
        """And each result goes to a file of its own."""
        for make in stages.STAGES.values():
            parts = make(setting)
            assert len({part.name for part in parts}) == len(parts)
            files = [
                a for p in parts for a in p.command if a.endswith((".csv", ".xml", ".json")) and "picture" not in p.name
            ]
            assert len(set(files)) == len(files)

    def test_what_is_missing_is_left_out(self, setting):
        """Sanitizer, profiler, matplotlib: with the cause, and without a run."""
        by_name = {part.name: part for make in stages.STAGES.values() for part in make(setting)}
        for tool in ("memcheck", "racecheck", "synccheck"):
            assert by_name[tool].missing() == "compute-sanitizer is not installed"
            watched = {argument.partition("/")[0] for argument in by_name[tool].command}
            assert {"accumulate", "check_finite", "norm", "scaled_copy"} <= watched
        assert by_name["counters-native"].missing() == "ncu is not installed"
        assert setting.missing("sys", "no_such_module_of_ours")() == "no_such_module_of_ours not installed"
        assert by_name["picture-bf16"].missing() in ("there are no results to draw", "matplotlib not installed")

    def test_a_sanitizer_that_does_not_work(self, tmp_path):
        """Its own words, and nothing is run under it."""
        program = tmp_path / "compute-sanitizer"
        program.write_text("#!/bin/sh\necho '========= Device not supported'\nexit 1\n")
        program.chmod(0o755)
        environment = {"PATH": str(tmp_path)}
        setting = stages.Setting(sys.executable, False, "9.0", 1, tmp_path, environment)
        (part,) = [p for p in stages.first(setting) if p.name == "memcheck"]
        assert part.missing() == "compute-sanitizer does not work here: Device not supported"

    def test_needs_a_gpu_or_a_rehearsal(self, monkeypatch, capsys):
        """In one line."""
        monkeypatch.setattr(machine, "describe", lambda python: {"gpus": 0})
        monkeypatch.chdir(ROOT)
        assert __main__.main(["--stage", "1"]) == 1
        assert "REHEARSE=1" in capsys.readouterr().err


NCU = """==PROF== Connected to process 12 (/usr/bin/python3)
native, torch.bfloat16, overflow='window': norm 1.5
==PROF== Profiling "accumulate_kernel" - 0: 0%....100% - 1 pass
"ID","Process ID","Kernel Name","dram__bytes.sum","dram__throughput.avg.pct_of_peak_sustained_elapsed",\
"gpu__time_duration.sum","l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",\
"l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio","launch__registers_per_thread"
"","","","Mbyte","%","ms","sector/request","sector/request","register/thread"
"0","12","void accumkernels::cuda::accumulate_kernel<0>(Args)","671.09","91.5","1,000.5","16","8","64"
"1","12","norm_kernel","268","20","0.1","4","n/a","32"
==PROF== Disconnected from process 12
"""


class TestNcu:
    """Nsight Compute's table."""

    def test_rows(self, tmp_path):
        """Units as the columns say, whatever ncu chose; what it does not have is empty."""
        first, second = ncu.rows(NCU)
        assert first["kernel"] == "void accumkernels::cuda::accumulate_kernel<0>(Args)"
        assert (first["us"], first["dram_bytes"], first["dram_percent"]) == (1_000_500.0, 671.09e6, 91.5)
        assert (first["load_sectors_per_request"], first["store_sectors_per_request"]) == (16, 8)
        assert second["store_sectors_per_request"] is second["warps_percent"] is None
        ncu.write(NCU, tmp_path / "counters_native.csv", "native")
        (step,) = summary.figures(tmp_path)
        assert "native norm_kernel: 20 % of DRAM's rate" in step

    def test_no_table(self):
        """Where it could not read the counters."""
        with pytest.raises(ValueError, match="no table"):
            list(ncu.rows("==ERROR== ERR_NVGPUCTRPERM\n"))

    def test_leaves_the_clocks_alone(self):
        """The machine may be shared."""
        command = ncu.command("ncu", ["python", "x.py"])
        assert command[command.index("--clock-control") + 1] == "none"
        assert command[-2:] == ["python", "x.py"]


class TestSummary:
    """What to do next."""

    def test_steps(self, tmp_path):
        """The build first, then failures, then what is missing, then what the figures say."""
        outcomes = [
            Outcome("build", FAILED, 3, "boom"),
            Outcome("tests", FAILED, 3, "FAILED tests/x.py::y"),
            Outcome("memcheck", CUT, 100, "longer than 100 s"),
            Outcome("racecheck", NOT_RUN, 0, "no time was left"),
            Outcome("picture", LEFT_OUT, 0, "matplotlib not installed"),
        ]
        (tmp_path / "kernels_cuda.csv").write_text(
            "table,shapes,method,dtype,gradients,micro_batches,elements,ms_median,host_ms,device_ms,GB_per_s,"
            "fraction_of_copy,ratio_to_ours\n"
            "accumulate,gpt2,limit: device copy,bf16,cold,1,124439808,0.2,,,4000,1.0,\n"
            "accumulate,gpt2,accumkernels,bf16,cold,1,124439808,0.4,0.05,0.39,3000,0.75,1.0\n"
            "accumulate,gpt2,mixed add_,bf16,cold,1,124439808,0.3,0.6,0.3,4000,1.0,0.75\n"
            "accumulate,tiny,accumkernels,bf16,cold,1,96000,0.1,0.7,,10,0.01,1.0\n"
        )
        steps = summary.next_steps(1, outcomes, tmp_path, "unknown", rehearse=False)
        said = ["Mend the build", "tests.log", "PARTS=memcheck", "PARTS=racecheck", "matplotlib", "0.75 of the copy"]
        said += ["mixed add_ takes 0.75 of our time", "ACCUMKERNELS_COMMIT=", "STAGE=2 comes next"]
        assert len(steps) == len(said)
        for step, part in zip(steps, said, strict=True):
            assert part in step
        assert summary.headlines(tmp_path) == [
            "gpt2, bf16, 124,439,808 elements: 0.4 ms (host 0.05, device 0.39), 3000 GB/s, 0.75 of a copy; "
            "mixed add_: 0.3 ms (host 0.6, device 0.3)",
            "tiny, bf16, 96,000 elements: 0.1 ms (host 0.7, device unknown), 10 GB/s, 0.01 of a copy",
        ]

    def test_measured_beside_simulated(self, tmp_path):
        """Every row that was timed, with what is known of it; no step comes of it."""
        (tmp_path / "device_time_cuda.csv").write_text("row,us,fraction_of_copy\nmul_,3.0,1.01\nother,3.0,0.5\n")
        simulated = tmp_path / "kernels_simulated.csv"
        header = "kernels,row,gpu,fraction_of_copy\n"
        simulated.write_text(header + "tried: x,mul_,A,0.5\nnow,mul_,A,1.1\nany,mul_,B,1.2\n")
        assert list(summary.beside_simulation(tmp_path, simulated)) == [
            "mul_: 1.01 measured; simulated: 1.1 (A), 1.2 (B)",
            "other: 0.5 measured",
        ]
        simulated.unlink()
        assert len(summary.next_steps(1, [], tmp_path, "abc", rehearse=False)) == 1

    def test_a_rehearsal_judges_no_figure(self, tmp_path):
        """Tiny sizes on a CPU mean nothing."""
        (tmp_path / "a.csv").write_text("fraction_of_copy\n0.1\n")
        assert len(summary.next_steps(4, [], tmp_path, "abc", rehearse=True)) == 1


def test_nothing_but_the_standard_library():
    """The check starts where torch does not import, and says so."""
    code = "import sys, tools.gpu_check.__main__; print({'torch', 'rich', 'numpy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
