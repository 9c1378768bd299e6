"""The site builds without a warning and asks nobody for anything; the notebooks run."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT

NOTEBOOKS = sorted(path.stem for path in (ROOT / "docs/notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return folder


def test_every_page_loads_its_own_files_only(site):
    """Links may lead elsewhere; scripts, styles, pictures and fonts may not."""
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    loaded = re.compile(r'(?:src|<link[^>]* href)="(?:https?:)?//[^"]*')
    found = {str(page): loaded.findall(page.read_text()) for page in pages}
    assert not {page: links for page, links in found.items() if links}


def test_the_reference_has_the_public_names(site):
    text = (site / "api/zetaclip.html").read_text()
    import zetaclip

    modules = {"losses", "methods"}
    missing = [n for n in zetaclip.__all__ if f"zetaclip.{n}" not in text and n not in modules]
    assert not missing
    assert "make_private_with_epsilon" in text and "Parameters:" in text


def test_drawings_and_notebooks_are_in_their_pages(site):
    assert (site / "how-it-works.html").read_text().count('class="zc"') == 6
    page = (site / "notebooks/pictures.html").read_text()
    assert "data:image/png;base64" in page and "check_parity" in page


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_run(name):
    """In a kernel of their own; they check themselves that ε is within the target."""
    pytest.importorskip("nbclient", reason="the extra `docs` is not installed")
    if name == "text-lora":
        pytest.importorskip("peft", reason="the extra `transformers` is not installed")
    place = ROOT / "docs/notebooks"
    spec = importlib.util.spec_from_file_location("execute", place / "execute.py")
    execute = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(execute)
    notebook = execute.tidy(execute.executed(place / f"{name}.ipynb"))
    assert any("ε = " in str(cell.get("outputs")) for cell in notebook.cells)
