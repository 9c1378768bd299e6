"""The HTML of every report: one file that needs nothing but a browser.

A page is a list of sections, each with text (trusted HTML, made by ``table`` and ``html.escape``)
and charts. The same sections become a file, or the data with which a live page renews itself.
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

# Seconds between two questions of a live page, if building an answer costs nothing worth counting.
WAIT = 2.0


@dataclass(frozen=True)
class Section:
    """``html`` is shown under the heading, above the charts. ``id`` holds letters, digits and "-"."""

    id: str
    heading: str = ""
    html: str = ""
    charts: tuple[Chart, ...] = ()


@dataclass(frozen=True)
class Page:
    title: str
    sections: tuple[Section, ...]
    footer: str = ""


def render(page: Page, live: bool = False) -> str:
    """The whole document. A live one has no pictures for print: it is drawn anew every few seconds."""
    charts = list(_charts(page))
    settings = {"themes": THEMES, "live": live, "wait": WAIT, "shape": shape(page)}
    code = _asset("page.js")
    policy = (
        f"default-src 'none'; script-src {_digest(bundle())} {_digest(code)}; style-src"
        " 'unsafe-inline'; img-src data: blob:; connect-src"
        f" {chr(39)}{'self' if live else 'none'}{chr(39)}; base-uri 'none'; form-action 'none'"
    )
    return (
        "<!DOCTYPE html>\n"
        '<html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width,'
        ' initial-scale=1">'
        f'<meta http-equiv=Content-Security-Policy content="{policy}">'
        "<meta name=referrer content=no-referrer><link rel=icon"
        f' href="data:,"><title>{escape(page.title)}</title>'
        f"<style>{_asset('page.css')}</style></head>\n<body><main>{main(page, stills=not live)}</main>"
        f"<footer>{page.footer}{' <span id=live role=status>live</span>' if live else ''}</footer>\n"
        f"<script type=application/json id=zetaclip-settings>{embed(settings)}</script>\n"
        "<script type=application/json"
        f" id=zetaclip-figures>{embed({chart.id: figure(chart) for chart in charts})}</script>\n"
        f"<script>{bundle()}</script>\n<script>{code}</script>\n</body></html>\n"
    )


def payload(page: Page) -> dict[str, Any]:
    """What a live page asks for: its parts and figures. With "main" added, it builds itself anew."""
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
    """Which sections and charts there are.

    While it stays, a live page changes what is inside and keeps the rest.
    """
    return " ".join(
        [*(section.id for section in page.sections), *(chart.id for chart in _charts(page))]
    )


def main(page: Page, stills: bool) -> str:
    parts = []
    for section in page.sections:
        heading = f"<h2>{escape(section.heading)}</h2>" if section.heading else ""
        figures = "".join(_figure(chart, stills) for chart in section.charts)
        grid = f"<div class=grid>{figures}</div>" if figures else ""
        name = _name(section.id)
        parts.append(
            f"<section id={name}>{heading}<div"
            f" data-part={name}>{section.html}</div>{grid}</section>\n"
        )
    return "".join(parts)


def _figure(chart: Chart, still: bool) -> str:
    name = _name(chart.id)
    image = f'<img class=still alt="{escape(chart.title)}" src="{picture(chart)}">' if still else ""
    return (
        f'<figure class="{chart.size}{" has-still" if still else ""}"'
        f" data-chart={name}><figcaption><h3 data-part=title-{name}>{escape(chart.title)}</h3><p"
        f" data-part=caption-{name}>{escape(chart.summary)}</p></figcaption><div class=plot"
        f' role=img aria-label="{escape(chart.title)}; the numbers are in the table'
        f' below"></div>{image}<details><summary>Numbers as a table</summary><div'
        f" data-part=table-{name}>{chart_table(chart)}</div></details></figure>"
    )


def _charts(page: Page) -> Iterable[Chart]:
    return (chart for section in page.sections for chart in section.charts)


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9-]+", text):
        raise ValueError(f"{text!r} can't name a part of a page")
    return text


def embed(value: Any) -> str:
    """JSON that can stand inside a script element: no "<", no bare line separators, no NaN."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


@lru_cache(maxsize=4)
def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


@lru_cache(maxsize=4)
def _digest(code: str) -> str:
    """The scripts that may run are these two, by their digests; one that slipped in through a name
    could not.
    """
    return f"'sha256-{base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()}'"
