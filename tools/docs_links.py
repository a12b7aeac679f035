"""For mkdocs: pages may link to files of the repository outside docs/, as they can where GitHub shows them.

Each file that is linked becomes a page of the site with its text, under source/; a notebook with what its cells show.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, InclusionLevel

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

_LINK = re.compile(r"\]\((\.\./[^)#\s]*)((?:#[^)\s]*)?)\)")  # groups: path, anchor
_LANGUAGES = {".py": "python", ".md": "markdown", ".yml": "yaml", ".sh": "bash", ".h": "cpp", ".cu": "cpp"}


def _in_repository(link: str, page_uri: str, config: MkDocsConfig) -> str | None:
    """The linked file's path from the root of the repository; None where it lies in docs/, or nowhere."""
    root, docs = Path(config.config_file_path).parent.resolve(), Path(config.docs_dir).resolve()
    path = (docs / page_uri).parent.joinpath(link).resolve()
    if path.is_relative_to(docs) or not path.is_relative_to(root) or not path.is_file():
        return None
    return path.relative_to(root).as_posix()


def _page_of(path: str) -> str:
    return f"source/{path}.md"


def _notebook(text: str) -> str:
    """A notebook as a page: its texts, its code, and the outputs that it is committed with."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text'])}```")
            elif picture := output.get("data", {}).get("image/png"):
                parts.append(
                    f'<img alt="{output["data"]["text/plain"][0]}" src="data:image/png;base64,{picture.strip()}">'
                )
    return "\n\n".join(parts)


def _listing(path: str, text: str) -> str:
    language = _LANGUAGES.get(Path(path).suffix, "text")
    return f"# {path}\n\n``````{language}\n{text}\n``````"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for every file that is linked."""
    for page in list(files.documentation_pages()):
        for link, _ in _LINK.findall(page.content_string):
            path = _in_repository(link, page.src_uri, config)
            if path is None or files.get_file_from_path(_page_of(path)):
                continue
            text = Path(config.config_file_path).parent.joinpath(path).read_text()
            body = _notebook(text) if path.endswith(".ipynb") else _listing(path, text)
            content = f"---\nsearch: {{exclude: true}}\n---\n{body}\n"
            files.append(File.generated(config, _page_of(path), content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links there."""
    if page.file.src_uri.startswith("source/"):
        return markdown

    def point(match: re.Match[str]) -> str:
        path = _in_repository(match[1], page.file.src_uri, config)
        if path is None:
            return match[0]
        return f"]({posixpath.relpath(_page_of(path), posixpath.dirname(page.file.src_uri) or '.')})"

    return _LINK.sub(point, markdown)
