"""tools/bootstrap.py, which makes the environment that everything else runs in."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_bootstrap_picks_the_newest_pip_of_an_index() -> None:
    """The highest number wins, not the last line or the longest name; yanked and source releases are left out."""
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "tools" / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    bootstrap = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bootstrap)
    page = """
    <a href="../../files/pip-9.0-py3-none-any.whl#sha256=aa11">pip-9.0-py3-none-any.whl</a>
    <a href="../../files/pip-23.10-py3-none-any.whl#sha256=bb22" data-requires-python="&gt;=3.7">pip</a>
    <a href="../../files/pip-23.9.1-py3-none-any.whl#sha256=cc33">pip</a>
    <a href="../../files/pip-24.0-py3-none-any.whl#sha256=dd44" data-yanked="broken">pip</a>
    <a href="../../files/pip-25.0.tar.gz#sha256=ee55">pip</a>
    """
    assert bootstrap.newest_wheel(page, "http://index.example/simple/pip/") == (
        "http://index.example/files/pip-23.10-py3-none-any.whl",
        "bb22",
    )
    with pytest.raises(ValueError, match="no wheel of pip"):
        bootstrap.newest_wheel("<html></html>", "http://index.example/simple/pip/")
