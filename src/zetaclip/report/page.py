"""The HTML of every report: one file that needs nothing but a browser.

A page is a list of sections. Each has text (trusted HTML, made by ``table`` and ``html.escape``)
and charts. The same sections become a file, or the data with which a live page updates itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from importlib import resources
from typing import Any

from .colours import DARK, GROUNDS, LIGHT
from .figure import Chart
from .interactive import bundle, figure
from .still import picture
from .table import chart_table

THEMES = {
    "light": (
        {str(slot): colour for slot, colour in enumerate(LIGHT)}
        | {
            "ink": "#1b1f23",
            "muted": "#56606a",
            "grid": "#d8dce0",
            "band": "rgba(90,100,110,.13)",
            "ground": GROUNDS["light"],
        }
    ),
    "dark": (
        {str(slot): colour for slot, colour in enumerate(DARK)}
        | {
            "ink": "#e8eaed",
            "muted": "#a5adb6",
            "grid": "#3a4149",
            "band": "rgba(200,210,220,.10)",
            "ground": GROUNDS["dark"],
        }
    ),
}

# Seconds between two requests of a live page, unless answers are expensive (see ``live.pace``).
WAIT = 2.0

_LIVE = " <span id=live role=status>live</span>"


@dataclass(frozen=True)
class Section:
    """One part of a page.

    Args:
        id: Letters, digits and "-"; unique on the page.
        heading: The heading, or "" for none.
        html: Trusted HTML, shown under the heading and above the charts.
        charts: The charts of the section.
    """

    id: str
    heading: str = ""
    html: str = ""
    charts: tuple[Chart, ...] = ()


@dataclass(frozen=True)
class Page:
    """A report before it is rendered.

    Args:
        title: The title of the browser tab.
        sections: The parts, from top to bottom.
        footer: Trusted HTML for the end of the page.
    """

    title: str
    sections: tuple[Section, ...]
    footer: str = ""


def render(page: Page, live: bool = False) -> str:
    """The whole HTML document.

    Args:
        page: What to show.
        live: Whether the page asks its server for changes. A live page has no pictures for print,
            because it is redrawn every few seconds.

    Returns:
        One self-contained document: styles, scripts and data are inside.
    """
    figures = {chart.id: figure(chart) for chart in _charts(page)}
    settings = {"themes": THEMES, "live": live, "wait": WAIT, "shape": shape(page)}
    code = _asset("page.js")
    connect = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; script-src {_digest(bundle())} {_digest(code)}; "
        f"style-src 'unsafe-inline'; img-src data: blob:; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        "<!DOCTYPE html>\n"
        "<html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f'<meta http-equiv=Content-Security-Policy content="{policy}">'
        '<meta name=referrer content=no-referrer><link rel=icon href="data:,">'
        f"<title>{escape(page.title)}</title>"
        f"<style>{_asset('page.css')}</style></head>\n"
        f"<body><main>{main(page, stills=not live)}</main>"
        f"<footer>{page.footer}{_LIVE if live else ''}</footer>\n"
        f"<script type=application/json id=zetaclip-settings>{embed(settings)}</script>\n"
        f"<script type=application/json id=zetaclip-figures>{embed(figures)}</script>\n"
        f"<script>{bundle()}</script>\n<script>{code}</script>\n</body></html>\n"
    )


def payload(page: Page) -> dict[str, Any]:
    """The data of a live page: its parts and figures.

    A page with other sections or charts than the browser shows also needs ``main``.
    """
    parts = {section.id: section.html for section in page.sections}
    for chart in _charts(page):
        parts |= {
            f"title-{chart.id}": escape(chart.title),
            f"caption-{chart.id}": escape(chart.summary),
            f"table-{chart.id}": chart_table(chart),
        }
    return {
        "title": page.title,
        "shape": shape(page),
        "parts": parts,
        "figures": {chart.id: figure(chart) for chart in _charts(page)},
    }


def shape(page: Page) -> str:
    """The ids of all sections and charts.

    While they stay the same, a live page replaces contents only and keeps its elements.
    """
    return " ".join(
        [*(section.id for section in page.sections), *(chart.id for chart in _charts(page))]
    )


def main(page: Page, stills: bool) -> str:
    """The HTML of all sections, with pictures for print if ``stills`` is true."""
    parts = []
    for section in page.sections:
        heading = f"<h2>{escape(section.heading)}</h2>" if section.heading else ""
        figures = "".join(_figure(chart, stills) for chart in section.charts)
        grid = f"<div class=grid>{figures}</div>" if figures else ""
        name = _name(section.id)
        body = f"<div data-part={name}>{section.html}</div>"
        parts.append(f"<section id={name}>{heading}{body}{grid}</section>\n")
    return "".join(parts)


def _figure(chart: Chart, still: bool) -> str:
    name, title = _name(chart.id), escape(chart.title)
    image = f'<img class=still alt="{title}" src="{picture(chart)}">' if still else ""
    return (
        f'<figure class="{chart.size}{" has-still" if still else ""}" data-chart={name}>'
        f"<figcaption><h3 data-part=title-{name}>{title}</h3>"
        f"<p data-part=caption-{name}>{escape(chart.summary)}</p></figcaption>"
        f'<div class=plot role=img aria-label="{title}; the numbers are in the table below"></div>'
        f"{image}<details><summary>Numbers as a table</summary>"
        f"<div data-part=table-{name}>{chart_table(chart)}</div></details></figure>"
    )


def _charts(page: Page) -> Iterable[Chart]:
    return (chart for section in page.sections for chart in section.charts)


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9-]+", text):
        raise ValueError(f"{text!r} is no id for a part of a page: use a-z, 0-9 and '-'")
    return text


def embed(value: Any) -> str:
    """JSON that is safe inside a script element: no "<", no raw line separators, no NaN."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


@lru_cache(maxsize=4)
def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


@lru_cache(maxsize=4)
def _digest(code: str) -> str:
    """The hash by which the content security policy allows a script.

    Only the two scripts of the page run. A script that got in through a folder's name does not.
    """
    return f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"
