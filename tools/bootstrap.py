"""Makes the project's virtual environment: `python3 tools/bootstrap.py --venv .venv --torch torch==2.13.0 test check`.

Needs nothing but Python's standard library, not even ensurepip or pip, and installs only what is missing: the build
requirements, torch and the extras named. A torch of the interpreter that runs this is used, with all that is installed
beside it, unless --replace-torch; no package may replace it. Without a network it goes on with what is there.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import ssl
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_TORCH = (2, 10)
READ_PYPROJECT = """
import json, sys
try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib
print(json.dumps(tomllib.load(open(sys.argv[1], "rb"))))
"""
TORCH_VERSION = "import importlib.metadata; print(importlib.metadata.version('torch'))"


def say(message: str) -> None:
    """Print a line that tells whose it is."""
    print(f"bootstrap: {message}", flush=True)


def runs(*command: str | Path, quiet: bool = True) -> bool:
    """Run a command; returns whether it succeeded."""
    output = subprocess.DEVNULL if quiet else None
    return subprocess.run(command, stdout=output, stderr=output).returncode == 0


def is_new_enough(torch_version: str) -> bool:
    """Compare with the oldest torch that the project works with."""
    return tuple(int(part) for part in re.findall(r"\d+", torch_version)[:2]) >= OLDEST_TORCH


def installed_beside_torch() -> list[str]:
    """Return the folders that the running interpreter takes packages from, if a usable torch is among them."""
    try:
        if not is_new_enough(importlib.metadata.version("torch")):
            return []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]


def create(folder: Path, borrowed: list[str]) -> Path:
    """Create the environment unless it is there, with the project and `borrowed` on its path; returns its Python."""
    python = folder / "bin" / "python"
    if not python.exists() or not runs(python, "-c", ""):
        say(f"creating {folder}")
        venv.create(folder, symlinks=True, clear=folder.exists())
    # Not --system-site-packages: made from within another environment, that would be the wrong system.
    where = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
    Path(where.strip(), "accumkernels-project.pth").write_text("\n".join([str(ROOT), *borrowed]) + "\n")
    return python


def newest_wheel(page: str, address: str) -> tuple[str, str]:
    """Pick from an index's page the address and the sha256 ('' where it gives none) of pip's newest release."""
    link = r'href="([^"#]*\bpip-([\d.]+)-py3-none-any\.whl)(?:#sha256=(\w+))?'
    tags = [tag for tag in re.findall(r"<a\s[^>]*>", page) if "data-yanked" not in tag]
    found = [match for tag in tags if (match := re.search(link, tag))]
    if not found:
        raise ValueError(f"{address} lists no wheel of pip")
    newest = max(found, key=lambda match: [int(part) for part in match[2].split(".")])
    return urllib.parse.urljoin(address, newest[1]), newest[3] or ""


def download_pip(python: Path) -> None:
    """Install pip with the pip inside its own wheel, fetched from the package index."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    context = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    with urllib.request.urlopen(f"{index}/pip/", context=context, timeout=60) as response:
        address, sha256 = newest_wheel(response.read().decode(), response.url)
    with urllib.request.urlopen(address, context=context, timeout=60) as response:
        content = response.read()
    if sha256 and hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(f"{address} does not have the checksum that the index gives")
    with tempfile.TemporaryDirectory() as folder:
        wheel = Path(folder, address.rpartition("/")[2])
        wheel.write_bytes(content)
        subprocess.run([python, f"{wheel}/pip", "install", "-q", "--no-index", wheel], check=True)


def provide_pip(python: Path) -> None:
    """Get pip from where it can be had: the environment, ensurepip, a pip of this interpreter, the package index."""
    if (
        runs(python, "-m", "pip", "--version")
        or runs(python, "-m", "ensurepip")
        or runs(sys.executable, "-m", "pip", "--python", python, "install", "-q", "pip")
    ):
        return
    say("no pip on this machine: fetching it from the package index")
    try:
        download_pip(python)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"bootstrap: pip could not be had: {error}") from None


def requirements(python: Path, extras: list[str]) -> list[str]:
    """Read from pyproject.toml what the build and the extras need, without torch."""
    project = json.loads(subprocess.check_output([python, "-c", READ_PYPROJECT, ROOT / "pyproject.toml"]))
    needed = list(project["build-system"]["requires"])
    for extra in extras:
        needed += project["project"]["optional-dependencies"][extra]
    return sorted({line for line in needed if not re.match(r"torch\b", line)})


def main() -> None:
    """Make the environment, or complete it."""
    if sys.version_info < (3, 10):  # noqa: UP036 (says it in a line, not in a traceback)
        raise SystemExit(f"bootstrap: this is Python {sys.version.split()[0]}, 3.10 is needed: make PYTHON=...")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--torch", required=True, help="what to install where there is no torch")
    parser.add_argument("--replace-torch", action="store_true", help="install --torch whatever is there")
    parser.add_argument("--stamp", type=Path, help="file to touch when everything is there")
    parser.add_argument("extras", nargs="+", help="extras of pyproject.toml to install")
    args = parser.parse_args()

    python = create(args.venv.absolute(), [] if args.replace_torch else installed_beside_torch())
    provide_pip(python)
    found = subprocess.run([python, "-c", TORCH_VERSION], capture_output=True, text=True).stdout.strip()
    use_found = found and is_new_enough(found) and not args.replace_torch
    # Named, or the newest torchvision gets its own torch.
    torch = [f"torch=={found}"] if use_found else shlex.split(args.torch)
    needed = [*torch, *requirements(python, args.extras)]
    say(f"{f'torch {found}' if use_found else args.torch}, {', '.join(args.extras)}: installing what is missing")
    # Of thousands of modules hundreds are imported: Python compiles these, once, when they are.
    pip = "-m pip install -q --no-compile --disable-pip-version-check".split()
    if runs(python, *pip, *needed, quiet=False):  # asks no index where nothing is missing
        if args.stamp:
            args.stamp.touch()
    elif runs(python, "-c", "import torch"):
        say("pip could not install everything (its message stands above): going on with what is there")
    else:
        raise SystemExit("bootstrap: torch could not be installed; TORCH=... on make's command line names another")


if __name__ == "__main__":
    main()
