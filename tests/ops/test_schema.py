"""One name for an op at every layer: its schema, its implementations and its tests."""

import inspect
import re
from pathlib import Path

import pytest
import torch

from accumkernels.ops import native, reference, triton
from accumkernels.ops.schema import SCHEMAS

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "csrc").is_dir())
on_every_op = pytest.mark.parametrize("op", SCHEMAS)


KINDS = {  # how the C++ entry takes an argument of a type off its stack
    "Tensor": "tensor",
    "Tensor?": "optional_tensor",
    "Tensor[]": "tensors",
    "int[]": "ints",
    "bool[]": "bools",
    "int": "value<int64_t>",
    "float": "value<double>",
    "bool": "value<bool>",
}


def arguments_in_schema(op: str) -> list[tuple[str, str]]:
    """Name and type of each."""
    text = re.sub(r"\(\w!\)|\*, ", "", SCHEMAS[op].partition(" -> ")[0][1:-1])
    declared = [argument.partition("=")[0].rpartition(" ") for argument in text.split(", ")]
    return [(name, kind) for kind, _, name in declared]


@on_every_op
def test_native_entry_takes_the_arguments_of_the_schema(op):
    """Off a stack that has no names: in this order, by these types, so many."""
    source = (ROOT / "csrc" / "bindings" / f"{op.rstrip('_')}.cpp").read_text()
    wanted = [(name, KINDS[kind]) for name, kind in arguments_in_schema(op)]
    assert re.findall(r"(\w+) = arguments\.([\w<>]+)\(\);", source) == wanted
    assert len(re.findall(r'arguments\.(?!h")', source)) == len(wanted)
    assert f'op = "{op}";\n  Arguments arguments(op, {len(wanted)}, stack, num_arguments);' in source


@on_every_op
def test_one_stem_at_every_layer(op):
    """A search for the op's stem finds the entry, both kernels and the tests."""
    stem = op.rstrip("_")
    for file in (f"bindings/{stem}.cpp", f"cpu/{stem}.cpp", f"cuda/{stem}.cu"):
        assert (ROOT / "csrc" / file).is_file()
    assert f"ACCUMKERNELS_REGISTER({op})" in (ROOT / "csrc" / "bindings" / f"{stem}.cpp").read_text()
    assert f"def {stem}_kernel(" in (ROOT / "accumkernels" / "ops" / "triton_kernels.py").read_text()
    assert list((ROOT / "tests").rglob(f"test_*{stem}.py"))


@on_every_op
def test_every_file_of_the_list_knows_it(op):
    """CONTRIBUTING's list of what an op needs is complete for those that are there, and names no file too many."""
    stem = op.rstrip("_")
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Add an op\n")[2].partition("\n## ")[0]
    steps = section.partition("1. ")[2].rpartition("5. ")[0]  # of the last, some ops have a test of another name
    files = re.findall(r"`((?:accumkernels|benchmarks|csrc|tests)/[\w./]+)`", steps)
    assert len(files) > 15
    paths = {file: ROOT / file.replace("OP", stem) for file in files}
    texts = {file: path.read_text() if path.exists() else "" for file, path in paths.items()}
    name = stem.replace("_", "")  # in kCheckFinite, too
    lacking = [file for file, text in texts.items() if name not in text.replace("_", "").lower()]
    assert not lacking, f"{op} is not in: {', '.join(lacking)}"


@pytest.mark.native
@on_every_op
def test_the_library_has_its_kernel(op):
    """Without one, calls would get plain torch, and pass every comparison with it."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"accumkernels::{op}", "CPU")


@on_every_op
def test_every_backend_takes_the_same_arguments(op):
    """Names, order and defaults; what a schema and a Python function can both say of them."""
    wanted = inspect.signature(getattr(reference, op))
    assert inspect.signature(getattr(triton, op)) == wanted
    assert getattr(native, op) is getattr(torch.ops.accumkernels, op).default
    assert list(wanted.parameters) == [name for name, _ in arguments_in_schema(op)]
