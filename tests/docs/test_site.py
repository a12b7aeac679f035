"""The site of docs/ is built without a warning, and its search finds the right page for the words that people type."""

from __future__ import annotations

import re

import pytest

from tests.support.doc_blocks import ROOT
from tests.support.site_search import SiteSearch

build = pytest.importorskip("mkdocs.commands.build", reason="make docs installs mkdocs")
config = pytest.importorskip("mkdocs.config")

pytestmark = pytest.mark.starts  # mkdocstrings has ruff format signatures

FIRST = 3  # pages that people look at
TYPED = {
    "out of memory": "guides/whole_batch/",
    "OOM": "guides/whole_batch/",
    "CUDA out of memory": "guides/whole_batch/",
    "DDP": "data_parallel/",
    "AMP": "guides/loop/",
    "GradScaler": "guides/loop/",
    "clip_grad_norm_": "swapping/",
    "FSDP": "fsdp2/",
    "Trainer": "guides/transformers/",
    "CLIP": "guides/contrastive/",
    "batch size": "planning/",
    "learning rate": "planning/",
    "checkpoint": "checkpoints/",
    "LoRA": "loops/",
    "GAN": "swapping/",
    "install": "install/",
    "faster": "performance/",
    "AK07": "troubleshooting/",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        build.build(config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    return folder


def test_searches(site):
    """The page is among the first that are shown."""
    search = SiteSearch(site)
    found = {words: search.pages(words)[:FIRST] for words in TYPED}
    assert {words: pages for words, pages in found.items() if TYPED[words] not in pages} == {}


def test_tabs(site):
    """The page of loops has its five as tabs, with their code inside, as GitHub shows them as sections."""
    html = (site / "guides/loop/index.html").read_text()
    assert re.findall(r'<label for="__tabbed_1_\d">(.+?)</label>', html) == re.findall(
        r"^### (.+)$", (ROOT / "docs/guides/loop.md").read_text(), re.MULTILINE
    )
    assert html.count("tabbed-block") == 5
    assert "<!-- setup" not in re.sub(r"<!--.*?-->", "", html, flags=re.DOTALL)
