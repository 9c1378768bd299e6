"""What the site does beyond MkDocs; mkdocs.yml names this file.

Notebooks become pages, and the settings of a training a table. Drawings are put into the page,
where they follow its colours. Links that leave docs/ lead to the repository, so that the same page
works as a file and on the site.
"""

from __future__ import annotations

import dataclasses
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DRAWING = re.compile(r"^!\[[^]]*\]\((?:\.\./)*drawings/([\w-]+\.svg)\)$", re.MULTILINE)
SETTINGS = "<!-- settings -->"
NOTEBOOK = re.compile(r"(\]\((?:\.\./)*(?:notebooks/)?[\w-]+)\.ipynb\)")
LINK = re.compile(r"(\]\()(\.\./[^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for every notebook."""
    docs = Path(config.docs_dir)
    for notebook in sorted(docs.glob("notebooks/*.ipynb")):
        name = notebook.relative_to(docs).with_suffix(".md").as_posix()
        text = as_markdown(json.loads(notebook.read_text()), notebook.name)
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Puts drawings into the page, and leads links out of docs/ to the repository."""
    drawings = Path(config.docs_dir) / "drawings"
    markdown = DRAWING.sub(lambda found: (drawings / found[1]).read_text(), markdown)
    if SETTINGS in markdown:
        markdown = markdown.replace(SETTINGS, settings())
    here = posixpath.dirname(page.file.src_uri)

    def outside(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", here, link[2]))
        if target.startswith("docs/"):
            return link[0]
        if not (Path(config.config_file_path).parent / target).exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {target}, which is not there")
        return f"{link[1]}{config.extra['repository']}/blob/main/{target}"

    return LINK.sub(outside, NOTEBOOK.sub(r"\1.md)", markdown))


def settings() -> str:
    """The settings of `zetaclip train` as a table."""
    from zetaclip.training.config import Config

    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for setting in dataclasses.fields(Config):
        usual = {} if setting.default is dataclasses.MISSING else setting.default
        meaning = setting.metadata["help"].replace("|", "\\|")
        rows.append(f"| `{setting.name}` | `{usual}` | {meaning} |")
    return "\n".join(rows)


def as_markdown(notebook: dict[str, Any], name: str) -> str:
    """The cells of a notebook, and what they printed or drew."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += [shown for output in cell["outputs"] if (shown := _shown(output))]
    parts.append(f"*This page is the notebook `docs/notebooks/{name}`.*")
    return "\n\n".join(parts) + "\n"


def _shown(output: dict[str, Any]) -> str:
    if output["output_type"] == "error":
        raise ValueError(f"a committed notebook holds an error: {output['evalue']}")
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "image/png" in data:
        return f'<img alt="" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    text = "".join(data.get("text/plain", "")).rstrip()
    return f"```{{ .text .output }}\n{text}\n```" if text else ""
