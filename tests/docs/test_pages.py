"""README and docs/: all code runs, every command exists, every figure, picture and message is really there."""

from __future__ import annotations

import ast
import csv
import re

import pytest
import torch

import accumkernels as ak
from tests.support import torchvision_ops
from tests.support.doc_blocks import DOCS, PAGES, ROOT, Block, blocks, commands, missing_packages, run_page, unknown

PACKAGE = ROOT / "accumkernels"
WORDS = 26_000  # that readers see in README and docs/
CODE = 84  # columns
BLOCKS = {page: blocks(page) for page in PAGES}
LANGUAGES = {"python", "diff", "bash", "text", "yaml", "json", "toml"}
ELLIPSIS = "…"  # in a quoted message: what differs from case to case


def name_of(page):
    """For test ids."""
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.runs for b in BLOCKS[p])], ids=name_of)
def test_blocks_run(page, tmp_path, monkeypatch, one_thread):
    """A page's blocks run in order, in one namespace; of a diff first the old side, then the new one."""
    if missing := missing_packages(page):
        pytest.skip(f"needs {', '.join(missing)}")
    torchvision_ops.declare()
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    run_page(page)


@pytest.mark.parametrize("block", [b for page in PAGES for b in BLOCKS[page] if b.reason is not None], ids=str)
def test_blocks_that_cannot_run(block):
    """They are Python all the same. Of a diff only the old side is left out."""
    for part in block.sides() if block.language == "diff" else [block]:
        if part.language == "python":
            compile(part.code, str(block), "exec")
    pytest.skip(block.reason)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_languages(page):
    """A block without a language would be checked by nobody."""
    fences = re.findall(r"^[ ]*(?:```|~~~)", page.read_text(), re.MULTILINE)
    visible = [block for block in BLOCKS[page] if page.read_text().splitlines()[block.line - 2].lstrip()[:1] in "`~"]
    assert len(fences) == 2 * len(visible)
    assert [f"{block}: {block.language!r}" for block in visible if block.language not in LANGUAGES] == []


@pytest.mark.parametrize("block", [b for page in PAGES for b in BLOCKS[page] if b.language == "bash"], ids=str)
def test_commands_exist(block):
    """Make targets, modules, options of ours, files and extras that a page names are there."""
    found = commands(block)
    assert found
    assert [problem for words in found if (problem := unknown(words))] == []


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("make nonsense", "target nonsense"),
        ("FLAG=1 python -m accumkernels.nonsense", "module accumkernels.nonsense"),
        ("python -m accumkernels plan --nonsense", "options plan --nonsense"),
        ("python examples/nonsense.py --flag", "file examples/nonsense.py"),
        ("pip install accumkernels[nonsense]", "extra nonsense"),
        ("nonsense --help", "program nonsense"),
        ("make test ARGS=-x", None),
        ("python -m accumkernels fit train:fit --device cpu", None),
        ("pip install -e .[test,check]", None),
    ],
)
def test_unknown_commands_are_found(command, problem):
    """The check of commands sees what is not there."""
    assert unknown(commands(Block(PAGES[0], 1, "bash", command))[0]) == problem


def visible(page):
    """What readers see of a page."""
    return re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)


def test_words():
    """Fewer are read."""
    counts = {name_of(page): len(visible(page).split()) for page in DOCS}
    assert sum(counts.values()) <= WORDS, sorted(counts.items(), key=lambda item: item[1])


@pytest.mark.parametrize("page", DOCS, ids=name_of)
def test_code_is_narrow(page):
    """Nobody scrolls sideways. Diffs of docs/loops.md are those of files, whose lines are longer."""
    if page.name != "loops.md":
        lines = [
            line for code in re.findall(r"```\w+\n(.*?)```", visible(page), re.DOTALL) for line in code.split("\n")
        ]
        assert [line for line in lines if len(line) > CODE] == []


def test_tables_of_readme_fit():
    """GitHub's column is 896 pixels wide: cells wrap between words, and a table scrolls where these do not fit."""
    page, column, letter = 896, 27, 9.0  # padding and border of a column; code, the widest
    for table in re.findall(r"^\|.*\|\n\|[-:| ]+\|\n(?:\|.*\|\n?)+", visible(DOCS[0]), re.MULTILINE):
        rows = [row.strip("|\n").split("|") for row in table.splitlines() if not re.fullmatch(r"[-:| ]+", row)]
        words = [[re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell).split() or [""] for cell in row] for row in rows]
        widest = [max(len(word) for cell in cells for word in cell) for cells in zip(*words, strict=True)]
        assert sum(column + letter * width for width in widest) <= page, rows[0]


def test_pictures_are_shown():
    """Each file of docs/images is on a page."""
    shown = "\n".join(page.read_text() for page in PAGES)
    assert [path.name for path in (ROOT / "docs/images").iterdir() if f"images/{path.name}" not in shown] == []


@pytest.mark.parametrize("page", [PAGES[0], PAGES[-1]], ids=name_of)
def test_links_outside_docs(page):
    """They lead to files; mkdocs looks after those of docs/."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)|(?:src|srcset)=\"([^\"]+)", page.read_text())
    assert links
    assert [link for pair in links for link in pair if link and not (page.parent / link).exists()] == []


def test_reference_is_complete():
    """Every public name has an entry in the reference."""
    text = "\n".join(page.read_text() for page in PAGES)
    entries = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    assert [name for name in ak.__all__ if f"accumkernels.{name}" not in entries] == []
    planned = re.findall(r"^::: accumkernels\.(?!ops|integrations)([\w.]+)$", text, re.MULTILINE)
    assert [name for name in planned if name not in ak.__all__] == []  # what it shows can be imported as it is shown


# ---- figures

TABLE = re.compile(r"^<!-- figures: (\S+) -->\n\n?((?:^\|.*\n)+)", re.MULTILINE)
FIGURES = [(page, *match.groups()) for page in PAGES for match in TABLE.finditer(page.read_text())]


@pytest.mark.parametrize(("page", "file", "table"), FIGURES, ids=lambda value: "")
def test_figures(page, file, table):
    """The numbers of a table that names its file are in that file, as precisely as they are written."""
    with (ROOT / file).open() as lines:
        values = [float(v) for row in csv.reader(lines) for v in row if re.fullmatch(r"-?\d+(\.\d+)?", v)]
    cells = [cell.strip() for row in table.splitlines()[2:] for cell in row.strip("|").split("|")[1:]]
    numbers = [cell for cell in cells if re.fullmatch(r"\d+(\.\d+)?", cell)]
    assert numbers
    half_a_digit = {n: 0.5001 * 10.0 ** -len(n.partition(".")[2]) for n in numbers}
    assert [n for n in numbers if not any(abs(v - float(n)) < half_a_digit[n] for v in values)] == []


# ---- messages


def literals(node):
    """A string expression as text, with an ellipsis for what is computed; None when it is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[drs]|\{\}", ELLIPSIS, node.value)
    if isinstance(node, ast.JoinedStr):
        text = "".join(part.value if isinstance(part, ast.Constant) else ELLIPSIS for part in node.values)
        return re.sub(rf"(\{{\}}|{ELLIPSIS})+", ELLIPSIS, text)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (literals(node.left) or ELLIPSIS) + (literals(node.right) or ELLIPSIS)
    return None


def messages(node=None):
    """Every text in the package's sources, of an expression as a whole."""
    if node is None:
        trees = [ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))]
        return [text for tree in trees for text in messages(tree)]
    text = literals(node) or ""
    if text.strip(ELLIPSIS):
        return [text]
    return [text for child in ast.iter_child_nodes(node) for text in messages(child)]


ENTRIES = re.findall(r"^### (AK\d\d): `(.+)`$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)


def test_codes():
    """A message that troubleshooting has an entry for ends with the entry's code, and no other one does."""
    assert [code for code, _ in ENTRIES] == [f"AK{number:02}" for number in range(1, len(ENTRIES) + 1)]
    patterns = [(code, re.compile(re.escape(entry).replace(ELLIPSIS, ".*"), re.DOTALL)) for code, entry in ENTRIES]
    expected = {(code, text) for text in messages() for code, pattern in patterns if pattern.match(text)}
    assert [text for code, text in expected if not text.endswith(f"({code})")] == []
    assert {code for code, _ in expected} == {code for code, _ in ENTRIES}
    said = [(found[1], text) for text in messages() if (found := re.search(r"\((AK\d\d)\)$", text))]
    assert set(said) == expected


def test_every_warning_names_the_library():
    """Programs seldom show the names of loggers: warnings go through those that put the library's name before them."""
    sources = {path.relative_to(PACKAGE): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert {str(path) for path, text in sources.items() if "getLogger(" in text} == {"errors.py"}
    spoken = [text for text in sources.values() if "warnings.warn(" in text]
    assert all(re.search(r"warnings\.warn\(\s*f?\"accumkernels: ", text) for text in spoken) and spoken
