"""One name for an op at every layer: its schema, its implementations and its tests."""

import inspect
import re
from pathlib import Path

import pytest
import torch

from accumkernels.ops import native, native_cuda, reference, triton
from accumkernels.ops.schema import SCHEMAS

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "csrc").is_dir())
on_every_op = pytest.mark.parametrize("op", SCHEMAS)


def declared_in_cpp(op: str) -> tuple[str, str]:
    """Name and arguments in the C++ entry's kSchema."""
    source = (ROOT / "csrc" / "bindings" / f"{op.rstrip('_')}.cpp").read_text()
    (braces,) = re.findall(r"constexpr Schema kSchema\{(.*?)\};", source, re.DOTALL)
    name, *arguments = re.findall(r'"(.*?)"', braces)
    return name, "".join(arguments)


@on_every_op
def test_schema_stands_next_to_the_native_entry(op):
    """To the letter: the entry takes its arguments off a stack in this order, by these types."""
    assert declared_in_cpp(op) == (op, SCHEMAS[op])


@on_every_op
def test_one_stem_at_every_layer(op):
    """A search for the op's stem finds the entry, both kernels and the tests."""
    stem = op.rstrip("_")
    for file in (f"bindings/{stem}.cpp", f"cpu/{stem}.cpp", f"cuda/{stem}.cu"):
        assert (ROOT / "csrc" / file).is_file()
    assert f'library.impl("{op}", {op});' in (ROOT / "csrc" / "bindings.cpp").read_text()
    assert f"def {stem}_kernel(" in (ROOT / "accumkernels" / "ops" / "triton_kernels.py").read_text()
    assert list((ROOT / "tests").rglob(f"test_*{stem}.py"))


@on_every_op
def test_every_backend_takes_the_same_arguments(op):
    """Names, order and defaults; what a schema and a Python function can both say of them."""
    wanted = inspect.signature(getattr(reference, op))
    assert inspect.signature(getattr(triton, op)) == wanted
    assert getattr(native, op) is getattr(torch.ops.accumkernels, op).default
    wraps = inspect.signature(getattr(native_cuda, op)).parameters  # the first ones, and hands on the rest
    assert all(n in wanted.parameters for n, p in wraps.items() if p.kind is p.POSITIONAL_OR_KEYWORD)
    in_schema = re.findall(r"(\w+)(?:=[\w.]+)?(?=, |\))", SCHEMAS[op].partition(" -> ")[0].replace("*, ", ""))
    assert list(wanted.parameters) == in_schema
