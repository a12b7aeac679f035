"""The adapters refuse a trainer that is missing or too old, and pyproject.toml asks for the same releases."""

from __future__ import annotations

import re
import sys
import types

import pytest

from accumkernels.errors import needs
from tests.support.environments import ROOT


def test_pyproject_asks_for_the_oldest_that_adapters_take():
    """Each adapter names its oldest release; extras that need several trainers agree on each."""
    said = {}
    for path in (ROOT / "accumkernels" / "integrations").glob("*.py"):
        said |= dict(re.findall(r'with needs\("(\w+)", oldest="([\d.]+)"\)', path.read_text()))
    assert set(said) == {"accelerate", "lightning", "transformers"}
    extras = re.findall(rf"^(?:{'|'.join(said)}) = .*", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    asked = [pair for extra in extras for pair in re.findall(r'"(\w+)>=([\d.]+)"', extra)]
    assert {name for name, _ in asked} == set(said)
    assert [(name, said[name]) for name, _ in asked] == asked


@pytest.mark.parametrize("version", ["1.9.0", "0.34", "1.10.0rc1"])
def test_too_old(monkeypatch, version):
    """By number, not by letter, before the adapter imports names that the release lacks."""
    pytest.importorskip("packaging")
    monkeypatch.setitem(sys.modules, "trainer", types.SimpleNamespace(__version__=version))
    said = (
        f"accumkernels.integrations.trainer needs trainer >= 1.10, and {version} is installed: "
        r"pip install 'accumkernels\[trainer\]'"
    )
    with pytest.raises(ImportError, match=said) as caught, needs("trainer", oldest="1.10"):
        pytest.fail("imported all the same")
    assert caught.value.name == "trainer"


@pytest.mark.parametrize("version", ["1.10.0", "1.10.0.post1", "2.0.0.dev0"])
def test_new_enough(monkeypatch, version):
    """The oldest release itself, and development versions of newer ones."""
    pytest.importorskip("packaging")
    monkeypatch.setitem(sys.modules, "trainer", types.SimpleNamespace(__version__=version))
    with needs("trainer", oldest="1.10"):
        imported = True
    assert imported


def test_missing():
    """The cause stays visible: a package of the trainer's own may be what is missing."""
    said = r"accumkernels.integrations.no_such needs no_such: pip install 'accumkernels\[no_such\]'"
    with pytest.raises(ImportError, match=said) as caught, needs("no_such", oldest="1.10"):
        pytest.fail("imported all the same")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
