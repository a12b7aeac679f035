"""What a native library and a wheel must fulfil to serve every Python, torch and machine.

Each gate returns what breaks it, so an empty list is a pass; tests/packaging/test_gates.py plants each
fault and sees it red.
"""

from __future__ import annotations

import importlib
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 3 * 2**20  # 2.1 MiB with seven architectures

NEEDED = r"libtorch\.so|libstdc\+\+\.so\.6|libgcc_s\.so\.1|lib(m|c|dl|pthread|rt)\.so\.\d|ld-linux.*\.so\.\d"
CUDA_SHIMS = r"aoti_torch_get_current_cuda_stream|torch_c10_cuda_\w+"  # in CUDA builds of torch alone
STABLE_HEADERS = r"torch/csrc/stable/.*|torch/headeronly/.*|torch/csrc/inductor/aoti_torch/c/.*"
TORCH_HEADERS = r"(torch|ATen|c10|caffe2)/.*"
# Where builds happen: every folder of the kind that this build knew, and those of people, of pip and of containers.
BUILD_FOLDERS = [ROOT, Path(torch.__file__).parent, Path(sys.prefix), Path.home()]
BUILD_PATH = rb"/(?:home|root|Users|work|workspace|build|builds|io|project|opt|usr/local|tmp)/[\w.+-]+[\w.+/-]*"


def output(*command: str | Path) -> str:
    """What a command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _symbols(library: Path, which: str) -> list[tuple[str, str]]:
    """(type, name) of the dynamic symbols, without their versions."""
    lines = output("nm", "-D", which, library).splitlines()
    return [(line.split()[-2], line.split()[-1].partition("@")[0]) for line in lines]


def needs(library: Path) -> list[str]:
    """NEEDED names libtorch.so, not what one build of torch consists of, no CUDA library and no libpython."""
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", output("readelf", "-dW", library))
    wrong = [name for name in needed if not re.fullmatch(NEEDED, name)]
    return wrong if "libtorch.so" in needed else [*wrong, "libtorch.so is not among them"]


def exports(library: Path) -> list[str]:
    """Its own C functions only: neither the static CUDA runtime nor C++ templates are visible to the process."""
    return [name for _, name in _symbols(library, "--defined-only") if not name.startswith("accumkernels_")]


def imports(library: Path) -> list[str]:
    """No symbol of one Python version, and what a CPU torch lacks only weakly."""
    wanted = _symbols(library, "--undefined-only")
    return [
        name for kind, name in wanted if re.match("_?Py", name) or (re.fullmatch(CUDA_SHIMS, name) and kind not in "wv")
    ]


def build_paths(library: Path) -> list[str]:
    """No string in it names a folder of the machine that built it."""
    content = library.read_bytes()
    found = [f"{folder}/" for folder in BUILD_FOLDERS if f"{folder}/".encode() in content]
    strings = re.findall(rb"[\x20-\x7e]{8,}", content)
    return found + [path.decode() for text in strings for path in re.findall(BUILD_PATH, text)]


def bulk(library: Path) -> list[str]:
    """Small, and without a symbol table for debuggers."""
    size = library.stat().st_size
    wrong = [] if size < MAX_BYTES else [f"{size} bytes"]
    return wrong + re.findall(r"\.symtab|\.debug_\w+", output("readelf", "-SW", library))


LIBRARY_GATES = (needs, exports, imports, build_paths, bulk)


def wheel_gate(wheel: Path, version: str) -> list[str]:
    """For any Python 3 of one platform, small, the package and one library in it and nothing else."""
    name = re.fullmatch(r"accumkernels-([^-]+)-py3-none-((?:many)?linux\w+)\.whl", wheel.name)
    if name is None or name[1] != version:
        return [f"{wheel.name} is not accumkernels-{version}-py3-none-<platform>.whl"]
    wrong = [f"{wheel.stat().st_size} bytes"] if wheel.stat().st_size >= MAX_BYTES else []
    return wrong + _contents(wheel, version, f"py3-none-{name[2]}", {"accumkernels/_native.so"})


def pure_wheel_gate(wheel: Path, version: str) -> list[str]:
    """For any Python 3 of any platform, the package without a library and nothing else."""
    if wheel.name != f"accumkernels-{version}-py3-none-any.whl":
        return [f"{wheel.name} is not accumkernels-{version}-py3-none-any.whl"]
    return _contents(wheel, version, "py3-none-any", set())


def _contents(wheel: Path, version: str, tag: str, libraries: set[str]) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"accumkernels-{version}.dist-info/WHEEL").decode()
    wrong = []
    if f"Root-Is-Purelib: {'false' if libraries else 'true'}" not in metadata or f"Tag: {tag}" not in metadata:
        wrong.append(f"WHEEL says {metadata!r}")
    package = (path for path in (ROOT / "accumkernels").rglob("*") if path.suffix in {".py", ".typed"})
    expected = {path.relative_to(ROOT).as_posix() for path in package} | libraries
    # auditwheel's wheels name their folders, too.
    found = {name for name in names if not name.startswith(f"accumkernels-{version}.dist-info/") and name[-1] != "/"}
    wrong += [f"missing: {missing}" for missing in sorted(expected - found)]
    wrong += [f"extra: {extra}" for extra in sorted(found - expected)]
    return wrong


def torch_includes(source: Path) -> dict[str, list[str]]:
    """The torch headers that each file under `source` includes, files without any left out."""
    found = {}
    for path in source.rglob("*"):
        if path.suffix in {".h", ".cpp", ".cu"}:
            headers = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', path.read_text(), re.MULTILINE)
            found[path.relative_to(source).as_posix()] = [h for h in headers if re.fullmatch(TORCH_HEADERS, h)]
    return {name: headers for name, headers in found.items() if headers}


def unstable_headers(source: Path) -> list[str]:
    """Everything of torch but its stable ABI changes from release to release."""
    headers = {header for headers in torch_includes(source).values() for header in headers}
    return sorted(header for header in headers if not re.fullmatch(STABLE_HEADERS, header))


def unstable_headers_reached(build: Path) -> list[str]:
    """The same of headers that the included ones include, as the compiler told ninja."""
    ninja = shutil.which("ninja") or f"{importlib.import_module('ninja').BIN_DIR}/ninja"
    deps = output(ninja, "-C", build.parents[1], "-f", build / "build.ninja", "-t", "deps")
    headers = set(re.findall(r"/torch/include/(\S+)", deps))
    if not any(re.fullmatch(STABLE_HEADERS, header) for header in headers):
        return [f"no torch header among the dependencies of {build}"]
    return sorted(header for header in headers if not re.fullmatch(STABLE_HEADERS, header))


def cuda_images(library: Path) -> list[set[str]]:
    """Per object file with CUDA code, the images in it: "sm_90" is machine code, "compute_90" PTX.

    Read from the .nv_fatbin section, since not every toolkit has cuobjdump.
    """
    sections = output("readelf", "-SW", library)
    found = re.search(r"\.nv_fatbin\s+PROGBITS\s+\w+\s+(\w+)\s+(\w+)", sections)
    if found is None:
        return []
    start, size = (int(number, 16) for number in found.groups())
    data, position, images = library.read_bytes()[start : start + size], 0, []
    while (position := data.find(b"\x50\xed\x55\xba", position)) >= 0:  # a container: magic, version, sizes
        header, length = struct.unpack_from("<HQ", data, position + 6)
        entry, end = position + header, position + header + length
        images.append(set())
        while entry < end:  # kind, version, header's size, body's size, ..., architecture at 28
            kind, _, head, body = struct.unpack_from("<HHIQ", data, entry)
            (arch,) = struct.unpack_from("<I", data, entry + 28)
            images[-1].add(f"{'compute' if kind == 1 else 'sm'}_{arch}")
            entry += head + body
        position = end
    return images
