"""Triton's own side: the tables, when the backend is available. test_compile_report.py compiles the kernels."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accumkernels.ops import triton
from accumkernels.ops import triton as triton_table
from tests.support.backends import FLOATS, Accumulate, Backend, place, random, scalar, squares

# Where the kernels run: in the interpreter when there is no GPU.
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


def run_python(*arguments: str) -> str:
    """The output of a Python process without TRITON_INTERPRET."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestTables:
    """What kernels read from tables."""

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 20_000), st.sampled_from(FLOATS), st.booleans()), max_size=20))
    def test_every_block_has_one_program(self, tensors):
        """Over all groups, each block of each tensor is some program's, once; a group's tensors are of its kind."""
        numels, kinds = tuple(t[0] for t in tensors), tuple(((t[1],), t[2]) for t in tensors)
        zeros = (0,) * len(tensors)
        plan = triton_table.plan(torch.device("cpu"), numels, zeros, zeros, kinds)
        seen = []
        for group in plan.groups:
            for program, index in enumerate(group.blocks.tolist()):
                assert kinds[index] == (group.dtypes, group.aligned)
                seen.append((index, program - plan.rows[index, 3].item()))
        blocks = [(i, block) for i, n in enumerate(numels) for block in range(math.ceil(n / triton_table.BLOCK))]
        assert sorted(seen) == blocks
        assert plan.num_programs == len(blocks)
        assert [g.first_program for g in plan.groups] == [
            sum(len(other.blocks) for other in plan.groups[:i]) for i in range(len(plan.groups))
        ]

    @pytest.mark.parametrize(
        ("shift", "offset", "aligned"), [(0, 4, True), (1, 4, False), (8, 4, True), (0, 5, False), (8, 2, False)]
    )
    def test_alignment_is_promised_where_it_holds(self, monkeypatch, shift, offset, aligned):
        """128-bit accesses need both tensors (fp16 and fp32 here) at multiples of 16 bytes."""
        plans = []
        plan = triton_table.plan
        monkeypatch.setattr(triton_table, "plan", lambda *args: plans.append(plan(*args)) or plans[-1])
        grad, buffer = place(random(70, torch.float16), DEVICE, shift), torch.zeros(100, device=DEVICE)
        layout, state = torch.tensor([[offset, 70]]), torch.zeros(4, dtype=torch.float64, device=DEVICE)
        segment = buffer[offset : offset + 70]
        triton.accumulate_(buffer, state, [grad], [0], [True], layout.to(DEVICE), layout)
        triton.scaled_copy_([segment], [grad])
        triton.scaled_copy_([grad], [segment])
        assert [p.groups[0].aligned for p in plans] == [aligned] * 3
        plans.clear()
        triton.norm_(scalar(0.0).to(DEVICE), [grad])
        flags = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        triton.check_finite_([grad], [0], scalar(0.0).to(DEVICE), flags)
        assert [p.groups[0].aligned for p in plans] == [shift % 8 == 0] * 2

    def test_plans_are_kept(self):
        """The same sizes are planned once."""
        arguments = (torch.device("cpu"), (5,), (0,), (0,), (((torch.float16,), True),))
        assert triton_table.plan(*arguments) is triton_table.plan(*arguments)

    @pytest.mark.parametrize("weight", [0.1, -0.0, math.inf, 5e-324])
    def test_weight_travels_as_its_bits(self, weight):
        """The last word of a call's table is the weight, an fp64 number."""
        table = triton_table.upload(torch.device("cpu"), [1, 2], overwrite=[True, False], weight=weight)
        assert table[:-1].tolist() == [1, 2, 0, 0, 1, 0]
        assert table.view(torch.float64)[-1].item() == weight


ASK = """
import os, sys, torch

def ask(device, before="", interpret=None):
    if interpret is not None:
        os.environ["TRITON_INTERPRET"] = interpret
    exec(before)
    from accumkernels.ops import triton
    return triton.unavailable(torch.device(device))

def is_imported_with_the_ops():
    import accumkernels.ops
    return "triton" in sys.modules

QUESTIONS = {
    "plain": lambda: ask("cpu"),
    "interpreted": lambda: ask("cpu", interpret="1"),
    "interpreted for a GPU": lambda: ask("cuda", interpret="1"),
    "too late": lambda: ask("cpu", "import triton.language; os.environ['TRITON_INTERPRET'] = '1'"),
    "no triton": lambda: ask("cuda", "sys.modules['triton'] = None"),
    "imported": is_imported_with_the_ops,
}
for name, question in QUESTIONS.items():
    if os.fork() == 0:  # nothing of ours is imported yet, nor Triton
        print(f"{name}: {question()}", flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


@pytest.fixture(scope="module")
def fresh() -> dict[str, str]:
    """The answers of fresh processes, which have torch's import in common."""
    return dict(line.split(": ", 1) for line in run_python("-c", ASK).splitlines())


class TestAvailability:
    """unavailable."""

    def test_other_devices(self):
        """Triton's kernels are for CUDA devices."""
        assert triton.unavailable(torch.device("meta")) == "Triton kernels run on CUDA devices, not on 'meta'"

    @pytest.mark.starts
    def test_cpu_needs_the_interpreter(self, fresh):
        """Without TRITON_INTERPRET=1 there is nothing that runs on the CPU."""
        assert "TRITON_INTERPRET=1" in fresh["plain"]
        assert fresh["interpreted"] == "None"

    @pytest.mark.starts
    def test_interpreter_cannot_read_gpu_memory(self, fresh):
        """With TRITON_INTERPRET=1 a GPU's addresses would be taken for the CPU's."""
        assert "cannot read GPU memory" in fresh["interpreted for a GPU"]

    @pytest.mark.starts
    def test_interpreter_chosen_too_late(self, fresh):
        """Triton decides when it is imported; half of it interpreted does not work."""
        assert fresh["too late"] == "TRITON_INTERPRET was changed after triton was imported"

    @pytest.mark.starts
    def test_without_triton(self, fresh):
        """A missing package is named, and the ops import all the same."""
        assert fresh["no triton"] == "the package triton is not installed"

    @pytest.mark.starts
    def test_import_is_lazy(self, fresh):
        """Importing the ops does not load Triton."""
        assert fresh["imported"] == "False"


if torch.cuda.is_available():

    @pytest.mark.gpu
    class TestOnGpu:
        """What only a GPU shows."""

        def test_no_host_synchronisation(self):
            """Neither the first call with new sizes nor a later one waits for the device."""
            grads = [random(5003, torch.float16).to(DEVICE)]
            layout_host = torch.tensor([[32, 5003]])
            layout = layout_host.to(DEVICE)
            buffer = torch.zeros(6000, device=DEVICE)
            state = torch.zeros(4, dtype=torch.float64, device=DEVICE)
            total = squares().to(DEVICE)
            torch.cuda.set_sync_debug_mode("error")
            try:
                for first in (True, False):
                    triton.accumulate_(buffer, state, grads, [0], [first], layout, layout_host, sq_norm=total)
                    triton.norm_(total[:1], [buffer])
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert state.tolist() == [2, 0, 2, 0]

        def test_side_streams(self):
            """Calls on several streams at once, each with tables made on another, agree with the reference."""
            case = Accumulate([random(9000 + i, torch.bfloat16, seed=i) for i in range(9)])
            for _ in range(4):
                with torch.cuda.stream(torch.cuda.Stream()):
                    case.check(Backend("triton", triton, DEVICE))

        def test_capture_is_refused(self):
            """A CUDA graph would replay a table that is gone."""
            out, tensor = scalar(0.0).to(DEVICE), torch.ones(5, device=DEVICE)
            triton.norm_(out, [tensor])
            with pytest.raises(RuntimeError, match="norm_: the Triton backend copies a table from the host"):
                with torch.cuda.graph(torch.cuda.CUDAGraph()):
                    triton.norm_(out, [tensor])
