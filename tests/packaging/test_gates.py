"""The gates that let one library serve every Python and torch, on the library that is built, and on planted faults."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import accumkernels
from accumkernels.ops import native
from tests.support import library_gates as gates

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = Path(accumkernels.__file__).with_name("_native.so")


@pytest.mark.native
@pytest.mark.parametrize("gate", gates.LIBRARY_GATES, ids=lambda gate: gate.__name__)
def test_library_passes(gate: Callable[[Path], list[str]]) -> None:
    """What each gate is for, its docstring says."""
    assert gate(LIBRARY) == []


@pytest.mark.starts
def test_only_stable_headers_of_torch_are_included() -> None:
    """Everything else of torch changes from release to release; nor do the stable ones include it."""
    assert gates.torch_includes(ROOT / "csrc")
    assert gates.unstable_headers(ROOT / "csrc") == []
    assert gates.unstable_headers_reached(ROOT / "build" / "native") == []


def test_only_the_bindings_include_torch() -> None:
    """Kernels and what they share compile without torch, on the host as well."""
    including = gates.torch_includes(ROOT / "csrc")
    assert {name for name in including if not name.startswith("bindings/")} == set()


@pytest.mark.native
def test_holds_exactly_the_images_it_says() -> None:
    """Each file of kernels has code for every architecture that the doctor names, and for no other."""
    info = native.build_info()
    assert info is not None
    images = gates.cuda_images(LIBRARY)
    assert bool(images) == (info["cuda"] is not None)
    assert [found for found in images if found != set(info["archs"])] == []


BODY = "extern int aoti_torch_fake(void); int accumkernels_f(void) { return aoti_torch_fake(); }\n"
PLANTED = {  # gate: C source and linker flags that it must refuse
    "needs": (BODY, ["-L{folder}", "-lpython3.99"]),
    "needs another part of torch": (BODY, ["-L{folder}", "-ltorch_cpu"]),
    "needs no torch": (BODY, ["-L{folder}", "-l:libc.so.6"]),
    "exports": (BODY + "int cudaMalloc(void) { return 0; }\n", []),
    "exports a class": (BODY + "int _ZN3FooC1Ev(void) { return 0; }\n", []),
    "imports": (BODY + "extern int PyList_New(int); int accumkernels_g(void) { return PyList_New(0); }\n", []),
    "imports a shim": (
        BODY + "extern int torch_c10_cuda_check_msg(int); int accumkernels_g(void) "
        "{ return torch_c10_cuda_check_msg(0); }\n",
        [],
    ),
    "build_paths": (BODY + 'const char* accumkernels_p = "{root}/csrc/bindings/norm.cpp";\n', []),
    "build_paths of another machine": (BODY + 'const char* accumkernels_p = "at /home/me/csrc/core.h:3";\n', []),
    "bulk": (BODY + "char accumkernels_c[3 << 20] = {1};\n", []),
    "bulk of symbols": (BODY + "int accumkernels_g(void) { return 1; }\n", ["-g", "-fdebug-prefix-map={folder}=."]),
}


def compile_c(folder: Path, name: str, source: str, *flags: str) -> Path:
    """Make a small library, stripped unless debugging is asked for."""
    (folder / "source.c").write_text(source)
    strip = [] if "-g" in flags else ["-s"]
    target = folder / name
    subprocess.run(["cc", "-shared", "-fPIC", "-w", *strip, "source.c", "-o", target, *flags], check=True, cwd=folder)
    return target


@pytest.mark.starts
@pytest.mark.parametrize("fault", PLANTED)
def test_gate_sees_its_fault(fault: str, tmp_path: Path) -> None:
    """A library with one fault is refused by the gate for it and passes all others."""
    for name in ("libtorch.so", "libtorch_cpu.so", "libpython3.99.so"):
        compile_c(tmp_path, name, "")
    source, flags = PLANTED[fault]
    source = source.replace("{root}", str(ROOT))
    flags = ["-Wl,--no-as-needed", *(flag.replace("{folder}", str(tmp_path)) for flag in flags)]
    if fault != "needs no torch":
        flags += [f"-L{tmp_path}", "-ltorch"]
    library = compile_c(tmp_path, "faulty.so", source, *flags)
    red = {gate.__name__ for gate in gates.LIBRARY_GATES if gate(library)}
    assert red == {fault.partition(" ")[0]}


@pytest.mark.parametrize("header", ["ATen/ATen.h", "c10/cuda/CUDAStream.h", "torch/extension.h"])
def test_gate_sees_an_unstable_header(header: str, tmp_path: Path) -> None:
    """Whichever file includes it."""
    sources = shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    (sources / "core" / "args.h").write_text(f"#include <{header}>\n")
    assert gates.unstable_headers(sources) == [header]


def test_gate_sees_a_faulty_wheel(tmp_path: Path) -> None:
    """A second library, a module left out, a tag for one Python, another version."""
    version, package = "1.0", ROOT / "accumkernels"
    wheel = tmp_path / "accumkernels-1.0-py3-none-linux_x86_64.whl"

    def write(*extra: str, leave_out: str = "", tag: str = "py3-none-linux_x86_64", filler: int = 0) -> list[str]:
        with zipfile.ZipFile(wheel, "w") as archive:
            for path in package.rglob("*"):
                if path.suffix in {".py", ".typed"} and path.name != leave_out:
                    archive.writestr(path.relative_to(ROOT).as_posix(), "")
            archive.writestr("accumkernels/_native.so", bytes(filler))
            archive.writestr("accumkernels-1.0.dist-info/WHEEL", f"Root-Is-Purelib: false\nTag: {tag}\n")
            for name in extra:
                archive.writestr(name, "")
        return gates.wheel_gate(wheel, version)

    assert write() == []
    assert write("accumkernels/_other.so") == ["extra: accumkernels/_other.so"]
    assert write("tests/test_wheel.py") == ["extra: tests/test_wheel.py"]
    assert write(leave_out="flat.py") == ["missing: accumkernels/buffers/flat.py"]
    assert "cp311" in write(tag="cp311-cp311-linux_x86_64")[0]
    assert write(filler=3 * 2**20)[0].endswith("bytes")
    wheel = wheel.rename(tmp_path / "accumkernels-1.0-cp311-cp311-linux_x86_64.whl")
    assert "py3-none-<platform>" in write()[0]
