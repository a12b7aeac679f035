"""Builds accumkernels/_native.so: c++ for bindings and CPU kernels, nvcc for CUDA kernels, driven by ninja.

The library uses torch's stable ABI and no Python C-API, so that one file serves every Python, every torch from 2.10 on,
with and without CUDA. Where it cannot be built, or is not wanted, the wheel is pure Python: py3-none-any.

Knobs in the environment: ACCUMKERNELS_BUILD and ACCUMKERNELS_BUILD_CUDA (auto | 0 | 1), CUDA_HOME, MAX_JOBS, CXX,
ACCUMKERNELS_CUDA_ARCHS ("8.0;9.0+PTX"), ACCUMKERNELS_VERSION_SUFFIX ("+cu130"), ACCUMKERNELS_SOURCE_URL (of a release).

pyproject.toml names this file as the build backend, too: setuptools' own, but that asks for torch and ninja only where
the library is built.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import setuptools

if int(setuptools.__version__.partition(".")[0]) < 77:  # pip looks at this only with build isolation
    raise SystemExit(
        f"accumkernels: setuptools {setuptools.__version__} is too old to build with: pip install 'setuptools>=77', or "
        "leave build isolation on"
    )

from setuptools import Extension, build_meta, setup
from setuptools.build_meta import *  # noqa: F403  the hooks that a build frontend calls
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BUILD = "build/native"  # relative, as all our paths are: ninja runs in ROOT, and no build path gets into the library
CXX = os.environ.get("CXX", "").strip() or "c++"
COMPILER = [CXX] if shutil.which(CXX) else CXX.split()  # "ccache g++", as make takes it, or a path with spaces
CXX_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-ffp-contract=off"]
CXX_FLAGS += ["-Wall", "-Wextra", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-DUSE_CUDA"]  # torch 2.10's stable ABI
AVX512_FLAGS = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mf16c", "-mfma"]
SIMD_FLAGS = {  # for csrc/cpu/*_avx2.cpp and so on, chosen at run time where the processor has the instructions
    "avx2": ["-mavx2", "-mf16c", "-mfma"],
    "avx512": AVX512_FLAGS,
    "avx512bf16": [*AVX512_FLAGS, "-mavx512bf16"],
}
NVCC_FLAGS = ["-O3", "-std=c++17", "-fmad=false", "-cudart", "static", "-t", "2", "-Xfatbin", "-compress-all"]
NVCC_FLAGS += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-ffp-contract=off"]
OLDEST_NVCC = (12, 1)  # from here on a kernel takes 32,764 bytes of arguments
ARCHS = ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]
RULES = f"""builddir = {BUILD}
rule compile
  command = $line -MD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = $in
rule link
  command = $line -o $out $in $libraries
  description = $out"""


class Cuda(NamedTuple):
    """The toolkit that was found, and what to build with it."""

    nvcc: str
    version: str  # "13.0"
    build: str  # of nvcc, "13.0.88"
    root: str
    library_dir: str
    targets: dict[str, list[str]]  # {"90": ["sm_90", "compute_90"]}: architecture, images to make for it


def fail(message: str) -> NoReturn:
    raise SystemExit(f"accumkernels: {message}")


def ask(*command: str) -> str:
    """Return what `command` prints on either stream; its failure ends the build with one line."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        fail(f"`{shlex.join(command)}` failed: {(done.stdout.strip().splitlines() or ['no message'])[-1]}")
    return done.stdout


def knob(name: str) -> str:
    """Return "auto", "0" or "1"."""
    wanted = os.environ.get(name) or "auto"
    if wanted not in ("auto", "0", "1"):
        fail(f"{name}={wanted}: expected auto, 0 or 1")
    return wanted


def why_pure() -> str | None:
    """Say why no library is built, so that the wheel is pure Python; None if one is."""
    wanted = knob("ACCUMKERNELS_BUILD")
    if wanted == "0":
        return "as asked"
    if sys.platform != "linux":
        cause = f"the library is for Linux, and this is {platform.system()}"
    elif not shutil.which(COMPILER[0]):
        cause = f"no C++ compiler: {COMPILER[0]} is not on PATH"
    else:
        return None
    if wanted == "1" or knob("ACCUMKERNELS_BUILD_CUDA") == "1" or os.environ.get("CXX"):
        fail(f"{cause}; ACCUMKERNELS_BUILD=0 installs without compiled kernels")
    return cause


def needed(package: str) -> NoReturn:
    """End a build without build isolation that lacks `package`."""
    fail(
        f"{package} must be installed to build (pip install {package.split()[0]}), or leave build isolation on, or "
        "install without compiled kernels (ACCUMKERNELS_BUILD=0)"
    )


def find_ninja() -> str:
    """Find it on PATH, or else in the package of that name."""
    found = shutil.which("ninja")
    if not found and not importlib.util.find_spec("ninja"):
        needed("ninja")
    return found or f"{importlib.import_module('ninja').BIN_DIR}/ninja"


def find_cuda() -> Cuda | None:
    """Find the toolkit in CUDA_HOME, or else that of the nvcc on PATH; None builds the CPU kernels alone."""
    wanted, home = knob("ACCUMKERNELS_BUILD_CUDA"), os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=os.path.abspath(f"{home}/bin") if home else None)
    if wanted == "0" or (wanted == "auto" and not home and not nvcc):
        print("accumkernels: building the CPU kernels alone:", "as asked" if wanted == "0" else "no nvcc on PATH")
        return None
    if not nvcc:
        fail(f"no nvcc in {f'CUDA_HOME={home}' if home else 'PATH'}; ACCUMKERNELS_BUILD_CUDA=0 builds without CUDA")
    version = re.search(r"release (\d+)\.(\d+)(?:, V([\d.]+))?", ask(nvcc, "--version"))
    if not version or (int(version[1]), int(version[2])) < OLDEST_NVCC:
        found = f"release {version[1]}.{version[2]}" if version else "unknown"
        fail(f"{nvcc} is {found}; needed is {'.'.join(map(str, OLDEST_NVCC))} or newer")
    # nvcc may be a wrapper script, far from its toolkit: a dry run tells where that is.
    dryrun = ask(nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull)
    root = re.search(r"^#\$ TOP=(.+)$", dryrun, re.MULTILINE)
    folders = re.findall(r'"-L([^"]+)"', dryrun)
    library_dir = next((folder for folder in folders if os.path.exists(f"{folder}/libcudart_static.a")), None)
    if not root or not library_dir:
        fail(f"the toolkit of {nvcc} lacks libcudart_static.a (looked in {folders})")
    release = f"{version[1]}.{version[2]}"
    return Cuda(nvcc, release, version[3] or release, os.path.normpath(root[1]), library_dir, cuda_targets(nvcc))


def cuda_targets(nvcc: str) -> dict[str, list[str]]:
    """Translate ACCUMKERNELS_CUDA_ARCHS: "8.0;9.0+PTX" is {"80": ["sm_80"], "90": ["sm_90", "compute_90"]}."""
    codes = re.findall(r"^sm_(\d+)(\d[a-z]?)$", ask(nvcc, "--list-gpu-code"), re.MULTILINE)
    known = {f"{major}.{minor}": major + minor for major, minor in sorted(codes, key=lambda code: int(code[0]))}
    asked = re.split(r"[;\s]+", os.environ.get("ACCUMKERNELS_CUDA_ARCHS", "").strip("; "))
    if asked == [""]:  # ours, as far as this nvcc can build them, and PTX of the newest for GPUs to come
        asked = [arch for arch in ARCHS if arch in known]
        asked[-1] += "+PTX"
    targets = {}
    for entry in asked:
        number = known.get(entry.removesuffix("+PTX"))
        if number is None:
            valid = " ".join(known)
            fail(f"ACCUMKERNELS_CUDA_ARCHS: this nvcc does not know {entry!r}; valid, each also with +PTX: {valid}")
        images = [f"sm_{number}"] + [f"compute_{number}"] * entry.endswith("+PTX")
        targets[number] = max(targets.get(number, []), images, key=len)  # an entry may come twice, once with +PTX
    return targets


def quoted(command: list[str]) -> str:
    """Write a command for ninja, which expands what a dollar begins even within the shell's quotes."""
    return shlex.join(command).replace("$", "$$")


def write_if_changed(path: str, text: str) -> None:
    if not os.path.exists(path) or Path(path).read_text() != text:  # what is not touched is not built again
        Path(path).write_text(text)


def write_build_info(version: str, cuda: Cuda | None) -> None:
    git = ["git", "rev-parse", "--short", "HEAD"]
    in_git = os.path.exists(".git") and shutil.which("git")
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if in_git else ""
    commit = commit or os.environ.get("ACCUMKERNELS_COMMIT", "").strip()  # of a copy without its history
    info = {
        "version": version,
        "cuda": cuda.version if cuda else None,
        "nvcc": cuda.build if cuda else None,
        "archs": list(itertools.chain.from_iterable(cuda.targets.values())) if cuda else [],
        "compiler": ask(*COMPILER, "--version").splitlines()[0],
        "commit": commit or None,
    }
    literal = json.dumps(json.dumps(info))
    write_if_changed(f"{BUILD}/build_info.h", f"#pragma once\n#define ACCUMKERNELS_BUILD_INFO {literal}\n")


def write_ninja(cuda: Cuda | None) -> None:
    """Write build.ninja: a compile step per source and one link step; and say what will be compiled."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        needed("torch 2.10 or newer")
    torch = spec.submodule_search_locations[0]
    prefixes = [(ROOT, "."), *([(cuda.root, "cuda")] if cuda else [])]
    maps = [f"-ffile-prefix-map={path}={name}" for path, name in prefixes]

    # Torch's folder stands in the bindings' commands alone: under build isolation it is another one each time, and the
    # kernels need not be compiled again for that. Of several maps that match the last wins, and torch may lie in ROOT.
    cxx = [*COMPILER, *CXX_FLAGS, *maps, "-Icsrc"]
    with_torch = [f"-ffile-prefix-map={torch}=torch", f"-I{BUILD}", f"-isystem{torch}/include"]
    bindings = map(str, sorted(Path("csrc/bindings").glob("*.cpp")))
    compile = [(path, [*cxx, *with_torch, *(["-DACCUMKERNELS_WITH_CUDA"] if cuda else [])]) for path in bindings]
    for source in sorted(Path("csrc/cpu").glob("*.cpp")):
        simd = SIMD_FLAGS.get(source.stem.rpartition("_")[2], []) if platform.machine() == "x86_64" else []
        compile.append((str(source), [*cxx, *simd]))
    if cuda:
        gencodes = [f"-gencode=arch=compute_{arch},code=[{','.join(codes)}]" for arch, codes in cuda.targets.items()]
        nvcc = [cuda.nvcc, *NVCC_FLAGS, *(f"-Xcompiler={entry}" for entry in maps), *gencodes, "-Icsrc"]
        compile += [(str(source), nvcc) for source in sorted(Path("csrc/cuda").glob("*.cu"))]

    # Linked by c++, since `nvcc -shared` writes its -L paths into the cubins' notes. Of torch only libtorch.so, which
    # pulls in what its build consists of. The version script keeps the static CUDA runtime and C++ templates private.
    write_if_changed(f"{BUILD}/exports.map", "{ global: accumkernels_*; local: *; };\n")
    link = [*COMPILER, "-shared", "-s", f"-Wl,--version-script={BUILD}/exports.map", "-Wl,--exclude-libs,ALL"]
    libraries = [f"-L{cuda.library_dir}", "-lcudart_static", "-ldl", "-lrt"] if cuda else []
    libraries += ["-lpthread", "-Wl,--no-as-needed", f"-L{torch}/lib", "-ltorch"]

    kernels = f"CPU kernels by {CXX}"
    if cuda:
        kernels += (
            f", CUDA kernels for {', '.join(cuda.targets)} by nvcc {cuda.build}; ACCUMKERNELS_BUILD_CUDA=0: without"
        )
    print(f"accumkernels: compiling {len(compile)} files: {kernels}", flush=True)

    lines = [RULES]
    for path, command in compile:
        lines += [f"build {BUILD}/{path}.o: compile {path}", f"  line = {quoted(command)}"]
    objects = " ".join(f"{BUILD}/{path}.o" for path, _ in compile)
    lines += [f"build {BUILD}/_native.so: link {objects} | {BUILD}/exports.map"]
    lines += [f"  line = {quoted(link)}", f"  libraries = {quoted(libraries)}"]
    write_if_changed(f"{BUILD}/build.ninja", "\n".join(lines) + "\n")


def describe(source_url: str) -> dict[str, object]:
    """Return what a package index shows: README, and the project's addresses.

    Only whoever publishes knows where the sources are: ACCUMKERNELS_SOURCE_URL is the address under which a release's
    files are shown, as "https://HOST/OWNER/accumkernels/blob/v1.0". README's relative links then lead there.
    """

    def point(match: re.Match[str]) -> str:
        before, path = match.groups()
        url = source_url.replace("/blob/", "/raw/") if path.endswith((".png", ".svg")) else source_url
        return f"{before}{url}/{path}" if Path(path).exists() else match[0]

    readme = Path("README.md").read_text(encoding="utf-8")
    pages = {"Source": "README.md", "Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
    return {
        "long_description": re.sub(r'(\]\(|src="|href=")([^)"\s#]+)', point, readme) if source_url else readme,
        "long_description_content_type": "text/markdown",
        "project_urls": {name: f"{source_url}/{path}" for name, path in pages.items() if source_url},
    }


class NativeBuildExt(build_ext):
    """Has ninja build the one library; setuptools copies it into the wheel or, in place, beside the sources."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"  # no CPython tag: every Python loads it

    def build_extension(self, ext: Extension) -> None:
        ninja, cuda, jobs = find_ninja(), find_cuda(), os.environ.get("MAX_JOBS", "")
        if jobs and not jobs.isdecimal():
            fail(f"MAX_JOBS={jobs}: expected a number")
        os.makedirs(BUILD, exist_ok=True)
        write_build_info(self.get_finalized_command("egg_info").egg_version, cuda)
        write_ninja(cuda)
        if subprocess.run([ninja, "-f", f"{BUILD}/build.ninja", *(["-j", jobs] if jobs else [])]).returncode:
            fail(
                "the native library did not build; the compiler's message stands above. ACCUMKERNELS_BUILD=0 installs "
                "without compiled kernels"
            )
        self.mkpath(os.path.dirname(self.get_ext_fullpath(ext.name)))
        self.force = True  # also onto a newer file, as what a copy that was interrupted has left
        self.copy_file(f"{BUILD}/_native.so", self.get_ext_fullpath(ext.name))


class FreshBuild(build):
    """Starts from an empty folder: setuptools would put what an earlier build left there into the wheel."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class AnyPythonWheel(bdist_wheel):
    """Tags the wheel for any Python 3 of this platform; without the library, of any platform."""

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Name what a build frontend installs before `build_wheel`; any torch will do, what is built is the same."""
    needed = build_meta.get_requires_for_build_wheel(config_settings)
    return needed if why_pure() else [*needed, "ninja", "torch>=2.10"]


get_requires_for_build_editable = get_requires_for_build_wheel


if __name__ == "__main__":
    cause, suffix = why_pure(), os.environ.get("ACCUMKERNELS_VERSION_SUFFIX", "")
    if not re.fullmatch(r"((a|b|rc|\.?post|\.?dev)\d+)*(\+[a-z0-9]+([._-][a-z0-9]+)*)?", suffix, re.IGNORECASE):
        fail(f"ACCUMKERNELS_VERSION_SUFFIX={suffix}: expected the end of a version, as +cu130")
    if cause and {"build", "build_ext", "bdist_wheel", "editable_wheel"} & set(sys.argv):
        print(f"accumkernels: a wheel for any platform, without compiled kernels: {cause}", flush=True)
    setup(
        **describe(os.environ.get("ACCUMKERNELS_SOURCE_URL", "").rstrip("/")),
        ext_modules=[] if cause else [Extension("accumkernels._native", sources=[])],
        cmdclass={"build": FreshBuild, "build_ext": NativeBuildExt, "bdist_wheel": AnyPythonWheel},
        options={
            "egg_info": {"tag_build": suffix},
            # A folder on the path, which comes before the clone's own if that is named accumkernels; a finder does not.
            "editable_wheel": {"mode": "compat"},
        },
    )
