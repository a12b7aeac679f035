"""Imports run one way, rooms keep their privates, and the map in CONTRIBUTING is true; planted faults are seen."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import rooms

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "accumkernels"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"


@functools.cache
def found(rule: Callable[[Path], list[str]]) -> list[str]:
    """What a rule finds in the package as it is."""
    return rule(PACKAGE)


def added(rule: Callable[[Path], list[str]], copy: Path) -> list[str]:
    """What a rule finds in a copy and not in the package, without the lines' numbers."""
    return [re.sub(r":\d+", "", fault) for fault in rule(copy) if fault not in found(rule)]


@pytest.fixture
def plant(tmp_path: Path) -> Callable[[str, str], Path]:
    """Appends a text to a module of a copy of the package, which it returns."""
    copy = tmp_path / "accumkernels"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so"))

    def plant(module: str, text: str) -> Path:
        with (copy / module).open("a") as file:
            file.write(f"\n{text}\n")
        return copy

    return plant


@pytest.mark.parametrize("rule", [rooms.arrows, rooms.privates, rooms.writes, rooms.circles, rooms.front_doors])
def test_package_keeps(rule):
    """The package breaks no rule."""
    assert found(rule) == []


def test_every_room_has_a_rule():
    """The table has no room that is not in the package; test_package_keeps sees rooms that are not in the table."""
    known = rooms.modules(PACKAGE).values()
    assert {module.room for module in known} >= set(rooms.MAY_IMPORT) - {"hooks"}
    for house, table in rooms.MAY_IMPORT_INSIDE.items():
        assert {module.room_inside for module in known if module.room == house} >= set(table)


def test_contributing_map_names_every_module():
    """Each module stands in the entry of its room, and no entry names a module that is gone."""
    assert rooms.unmapped(PACKAGE, CONTRIBUTING) == []


def test_contributing_names_files_that_exist():
    """Below the map, too; OP stands for an op of the reader's own."""
    named = re.findall(r"`([\w/]+/\w+\.(?:py|h|cpp|cu))`", CONTRIBUTING.read_text())
    assert len(named) > 20
    roots = (ROOT, PACKAGE, ROOT / "benchmarks")
    gone = [name for name in named if "OP." not in name and not any((root / name).exists() for root in roots)]
    assert gone == []


ENDING = "def later():\n    from ..window.end import Ending"
TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import accumkernels.ranks.ddp"
UP = [  # module, what is added to it, whom it must not import
    ("ops/reference.py", "from ..buffers import flat", "buffers.flat"),
    ("buffers/parameters.py", ENDING, "window.end"),
    ("capture/inbox.py", TYPES, "ranks.ddp"),
    ("ranks/ddp.py", "from ..capture.inbox import drop, take", "capture.inbox"),
    ("window/state.py", "from accumkernels import accumulator", "accumulator"),
    ("window/end.py", "from ..batch_statistics import warn_of_batchnorm", "batch_statistics"),
    ("accumulator.py", "from . import planning", "planning"),
    ("planning/worth.py", "from .. import doctor", "doctor"),
    ("window/end.py", "from ..planning import trial", "planning.trial"),
    ("hooks.py", "from .ops import schema", "ops.schema"),
    ("arguments.py", "from .ops.schema import State", "ops.schema"),
]
PRIVATE = [  # what is added to window/verdict.py, the name, its room
    ("from ..buffers.store import _log", "_log", "buffers"),
    ("from ..buffers import store as stored\nstored._log = None", "_log", "buffers"),
    ("import accumkernels.ops\naccumkernels.ops._warned.clear()", "_warned", "ops"),
    ("def f(store):\n    return store._planted", "_planted", "buffers"),
]


@pytest.mark.parametrize(("module", "text", "other"), UP, ids=lambda value: value.partition("\n")[0])
def test_arrow_that_runs_up_is_seen(plant, module, text, other):
    """Imports up, sideways and past a floor are found, in functions and under TYPE_CHECKING too."""
    room = module.split("/")[0].removesuffix(".py")
    assert added(rooms.arrows, plant(module, text)) == [f"{module}: {room} must not import accumkernels.{other}"]


@pytest.mark.parametrize(
    ("module", "text", "inside", "other"),
    [
        ("trial.py", "from .worth import plan", "trial", "worth"),
        ("trial.py", "def f():\n    from . import costs", "trial", "costs"),
        ("memory.py", "from . import batch_size, trial", "memory", "batch_size"),
        ("training.py", "from .trial import run", "training", "trial"),
        ("worth.py", "import accumkernels.planning.commands", "worth", "commands"),
    ],
)
def test_arrow_inside_a_house_is_seen(plant, module, text, inside, other):
    """A room that is a house has floors of its own."""
    first, *more = added(rooms.arrows, plant(f"planning/{module}", text))
    assert first == f"planning/{module}: planning/{inside} must not import accumkernels.planning.{other}"
    assert len(more) == text.count(",")


def test_imports_that_may_be_are_no_fault(plant):
    """Imports may run down and inside a room, and every room may import hooks."""
    plant("window/end.py", "from ..ops import reference\nfrom . import state\nfrom ..hooks import profiled")
    plant("ops/reference.py", "from ..hooks import profiled")
    assert added(rooms.arrows, plant("demo/gpt.py", "import accumkernels")) == []


def test_room_without_a_rule_is_seen(plant):
    """A new module in the root has to be put into the table."""
    assert added(rooms.arrows, plant("misc.py", "")) == ["misc.py: misc is not in MAY_IMPORT"]


def test_room_in_a_house_without_a_rule_is_seen(plant):
    """So does one in a house."""
    found = added(rooms.arrows, plant("planning/misc.py", ""))
    assert found == ["planning/misc.py: planning/misc is not in MAY_IMPORT_INSIDE"]


@pytest.mark.parametrize(("text", "name", "room"), PRIVATE, ids=["import", "module", "dotted", "object"])
def test_private_name_of_another_room_is_seen(plant, text, name, room):
    """It may be imported, an attribute of a module, or an attribute that nobody in this room defines."""
    plant("buffers/store.py", "class Planted:\n    def f(self):\n        self._planted = self._planted")
    copy = plant("window/verdict.py", text)
    assert added(rooms.privates, copy) == [f"window/verdict.py: {name} is private to {room}"]


@pytest.mark.parametrize(
    "text",
    [
        "class Later:\n    def f(self):\n        return self.accumulator._scaler.scaler",
        "def f(accumulator):\n    return accumulator._scaler",
        "def f(optimizer: FusedAccumulator):\n    return optimizer.accumulator._scaler",
    ],
    ids=["of another module", "of this one", "annotated"],
)
def test_private_name_with_a_namesake_is_seen(plant, text):
    """The adapters have a `_scaler` of their own, and these are the accumulator's."""
    (fault,) = added(rooms.privates, plant("integrations/window.py", text))
    assert fault.startswith("integrations/window.py: _") and "is private to" in fault


def test_private_names_of_own_classes_and_of_torch_are_no_fault(plant):
    """An argument that is annotated with a class of the module; a module's children and a scaler's scale."""
    own = "class Planted:\n    def f(self, other: Planted):\n        self._scaler = other._scaler"
    copy = plant("integrations/window.py", own)
    plant("window/end.py", "def f(module, scaler):\n    return module._modules, scaler._device")
    assert added(rooms.privates, copy) == []


WRITTEN = [  # module, what is added to it, whose attribute is assigned
    ("window/end.py", "def f(window):\n    window.phase = None", "phase", "window/state.py"),
    ("window/misuse.py", "def f(it):\n    it._window.found_nothing += 1", "found_nothing", "window/state.py"),
    ("window/loss.py", "def f(end):\n    end.store.layout.device = None", "device", "buffers/flat.py"),
    ("window/verdict.py", "def f(buffer):\n    buffer.touched[0] = 1", "touched", "buffers/flat.py"),
    ("ranks/group.py", "def f(store):\n    del store.masters", "masters", "buffers/store.py"),
    ("accumulator.py", "def f(runner):\n    runner.serial, _ = 0, 1", "serial", "window/micro_batch.py"),
    (
        "integrations/optimizer_accumulator.py",
        "def f(window):\n    window.engine.ending.reached = True",
        "reached",
        "window/end.py",
    ),
]


@pytest.mark.parametrize(("module", "text", "name", "other"), WRITTEN, ids=[entry[2] for entry in WRITTEN])
def test_assignment_to_another_object_is_seen(plant, module, text, name, other):
    """Also where it is reached by way of a third, in parts, added to or deleted."""
    assert added(rooms.writes, plant(module, text)) == [f"{module}: {name} is assigned, which {other} defines"]


def test_assignments_that_may_be_are_no_fault(plant):
    """To self, to an object of the module's own class, and to what is torch's."""
    lines = [
        "p.grad = None",
        "optimizer.grad_scale = optimizer.found_inf = p",
        "module.weight.data = p",
        "ctx.rows = 1",
    ]
    copy = plant("window/end.py", "def f(p, optimizer, module, ctx):\n    " + "\n    ".join(lines))
    plant("window/verdict.py", "class Planted:\n    def f(self, other):\n        self.planted = other.planted = 1")
    plant("integrations/several.py", "def f(window):\n    window.running = None")
    assert added(rooms.writes, copy) == []


def test_circle_is_seen(plant):
    """A circle inside a room counts, and so does an import that waits in a function."""
    copy = plant("buffers/parameters.py", "def f():\n    from .flat import FlatBuffer")
    (circle,) = rooms.circles(copy)
    assert {"buffers/parameters.py", "buffers/flat.py"} <= set(circle.split(" -> "))


def test_front_door_is_watched(plant):
    """Code, a docstring too long or missing, no select() in ops, and many modules in the root are all found."""
    copy = plant("ranks/__init__.py", "import torch")
    (copy / "window" / "__init__.py").write_text('"""Holds.\n\nOne.\nTwo.\nThree.\nFour.\n"""\n')
    (copy / "buffers" / "__init__.py").write_text("")
    (copy / "ops" / "__init__.py").write_text('"""Ops."""\n')
    for number in range(rooms.MODULES_IN_ROOT):
        plant(f"more{number}.py", "")
    count = len(list(copy.glob("*.py")))
    assert sorted(added(rooms.front_doors, copy)) == sorted(
        [
            "ranks/__init__.py: has code",
            "window/__init__.py: a docstring of 5 lines, 1 to 4 are right",
            "buffers/__init__.py: a docstring of 0 lines, 1 to 4 are right",
            "ops/__init__.py: has no select()",
            f"{count} modules in the root, at most 11 are right",
        ]
    )


def test_map_is_held_to_the_package(plant, tmp_path):
    """A module has to be in its own room's entry: its name in another room's is not enough."""
    copy = plant("window/planted.py", "")
    text = "accumkernels/\n" + "".join(f"  {line}\n" for line in map_of(copy)) + "tests/\n"
    page = tmp_path / "CONTRIBUTING.md"
    page.write_text(text)
    assert rooms.unmapped(copy, page) == []
    page.write_text(text.replace(", planted", "").replace("ranks/ ", "ranks/  planted, gone.py, "))
    assert rooms.unmapped(copy, page) == [
        "window/planted.py is not in the map",
        "gone.py is in the map, not in the package",
    ]


def map_of(package):
    """A map that is right: a line per module of the root and per room."""
    for path in sorted(package.iterdir()):
        if path.suffix == ".py":
            yield f"{path.name}  what it is"
    for folder in sorted({file.parent for file in package.rglob("*.py")} - {package}):
        yield f"{folder.relative_to(package)}/  " + ", ".join(file.stem for file in sorted(folder.glob("*.py")))
