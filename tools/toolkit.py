"""Installs a CUDA toolkit from the Python package index: `python tools/toolkit.py 13.2 --python PYTHON FOLDER`.

Just what a build needs, some 300 MB: nvcc and its parts, the static runtime and its headers. Prints the folder to give
as CUDA_HOME. PYTHON is one with pip.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

PACKAGES = ("nvidia-cuda-nvcc", "nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl")


def main() -> None:
    """Install it unless it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", help="a minor release of CUDA 13, as 13.2: all packages are of this one")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=sys.executable)
    args = parser.parse_args()
    found = re.fullmatch(r"13\.(\d+)", args.release)
    if found is None:
        raise SystemExit(f"toolkit: {args.release!r} is not a minor release of CUDA 13, as 13.2")

    home = args.folder.absolute() / "nvidia" / "cu13"
    if not (home / "bin" / "nvcc").exists():
        pip = [args.python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--upgrade"]
        # From 13.3 on CCCL's packages carry its own version after the 13: that of CUDA 13.5 is 13.3.5.0.6, CCCL 3.5.0.
        cccl = f"13.3.{found[1]}" if int(found[1]) >= 3 else args.release
        wanted = [f"{name}=={cccl if name.endswith('cccl') else args.release}.*" for name in PACKAGES]
        if subprocess.run([*pip, "--target", args.folder, *wanted]).returncode:
            raise SystemExit(f"toolkit: CUDA {args.release} could not be installed; pip's message stands above")
    if not (home / "lib64").exists():  # where the nvcc of some releases, as 13.0, looks for the libraries in lib
        (home / "lib64").symlink_to("lib")
    print(home)


if __name__ == "__main__":
    main()
