"""The page in a real browser: drawn, readable on a phone and on paper, quiet on the console, and
live.

One Chromium serves the whole file. Without one every test here is skipped and says so.
"""

import re
import threading
import time
import zlib

import browser
import pytest
from fake_experiment import experiment
from fake_runs import append, dump, invented, lines, result, status, trained

from zetaclip.report import write_report
from zetaclip.report.live import serve

pytestmark = browser.needs_chromium

EVIL = "\"><script>window.evil=1<∕script><b>x<∕b><img src=x onerror='window.evil=2'>".replace(
    "∕", "\N{DIVISION SLASH}"
)

# Every text and every mark of a chart lies inside its drawing, and every drawing inside the window.
CUT_OFF = """
(() => {
  const found = [];
  const width = document.documentElement.clientWidth;
  const scrolls = document.documentElement.scrollWidth;
  if (scrolls > width) found.push(["page", scrolls]);
  const kinds = "h1, h2, h3, p, dl, pre, figure, ul, .frame, summary, button.copy, footer";
  for (const one of document.querySelectorAll(kinds)) {
    // Tables scroll in their frames.
    if (one.closest(".frame") && !one.classList.contains("frame")) continue;
    const start = one.textContent.slice(0, 40);
    const box = one.getBoundingClientRect();
    if (box.width && (box.left < -0.5 || box.right > width + 0.5))
      found.push([one.tagName, start, box.left, box.right]);
    if (one.matches("h1, h2, h3, p, pre, summary") && one.scrollWidth > one.clientWidth + 1)
      found.push(["text", start]);
  }
  for (const plot of document.querySelectorAll(".plot")) {
    const frame = plot.getBoundingClientRect();
    for (const text of plot.querySelectorAll("svg text")) {
      const box = text.getBoundingClientRect();
      if (!box.width) continue;
      // Outside the frame by this much, on each side.
      const over = [
        frame.left - box.left, box.right - frame.right,
        frame.top - box.top, box.bottom - frame.bottom,
      ];
      if (Math.max(...over) > 1)
        found.push([plot.parentElement.dataset.chart, text.textContent, ...over]);
    }
  }
  return found;
})()
"""

# What each chart really shows: paths with a length, or markers, per series.
MARKS = """
Object.fromEntries([...document.querySelectorAll("figure")].map((figure) => {
  const lines = [...figure.querySelectorAll(".plot .scatterlayer path.js-line")]
    .filter((path) => path.getTotalLength() > 5).length;
  const dots = figure.querySelectorAll(".plot .scatterlayer path.point").length;
  const bars = [...figure.querySelectorAll(".plot .barlayer .point path")]
    .filter((path) => path.getBBox().width > 0.5).length;
  return [figure.dataset.chart, lines + dots + bars];
}))
"""


@pytest.fixture(scope="module")
def tab():
    started = browser.start()
    yield started
    started.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """One trained run; ten made-up ones, one with an evil name; an experiment."""
    root = tmp_path_factory.mktemp("pages")
    one = write_report([trained(root / "spectral", epochs=8)], root / "one.html", verify=False)
    runs = [
        invented(root / f"a-run-with-a-rather-long-name-{seed}", seed=seed, lr=seed, ledger=False)
        for seed in range(9)
    ]
    runs.append(invented(root / EVIL, seed=9, metric="auc", ledger=False))
    with pytest.MonkeyPatch.context() as patch:  # the pictures of one page are enough to look at
        patch.setattr("zetaclip.report.page.picture", lambda chart: "data:,")
        ten = write_report(runs, root / "ten.html", verify=False)
        results = experiment(root / "results")
        return {
            "one": one,
            "ten": ten,
            "experiment": write_report([results], root / "e.html", experiment="iid"),
        }


@pytest.mark.parametrize("name", ["one", "ten", "experiment"])
@pytest.mark.parametrize("width", [1280, 390])
def test_drawn_whole_and_without_a_word_on_the_console(tab, pages, name, width):
    tab.media("light")
    tab.size(width, mobile=width < 500)
    tab.open(pages[name])
    marks = tab.js(MARKS)
    assert marks and all(marks.values()), marks
    assert tab.js(CUT_OFF) == []
    assert tab.console == []
    assert [address for address in tab.requests if not address.startswith(("file:", "data:"))] == []
    assert tab.js("window.evil") is None


def test_hover_shows_values(tab, pages):
    tab.visit(pages["one"])
    x, y = centre(tab, "[data-chart=metric-accuracy] .scatterlayer path.point:last-child")
    tab.mouse("mouseMoved", x - 3, y)
    tab.mouse("mouseMoved", x, y)
    tab.wait(
        "document.querySelector('[data-chart=metric-accuracy] .hoverlayer').textContent.length > 0"
    )
    shown = tab.js("document.querySelector('[data-chart=metric-accuracy] .hoverlayer').textContent")
    value = tab.js("document.querySelector('[data-chart=metric-accuracy] .plot').data[0].y.at(-1)")
    assert "epoch: 8" in shown and f"{value:.4g}" in shown


def centre(tab, selector):
    """Scrolls there, and tells where it is in the window."""
    tab.js(f"document.querySelector('{selector}').scrollIntoView({{block: 'center'}})")
    return tab.js(
        f"(() => {{ const b = document.querySelector('{selector}').getBoundingClientRect();"
        " return [b.left + b.width / 2, b.top + b.height / 2]; })()"
    )


def test_a_click_in_the_legend_hides_a_series(tab, pages):
    tab.visit(pages["one"])
    before = tab.js(MARKS)["zeta"]
    x, y = centre(tab, "[data-chart=zeta] .legend .traces:last-child .legendtoggle")
    tab.click(x, y)
    tab.wait(
        "document.querySelector('[data-chart=zeta] .plot').data.some((trace) => trace.visible "
        "=== 'legendonly')"
    )
    tab.wait(f"({MARKS})['zeta'] < {before}")


def test_a_click_on_a_heading_sorts(tab, pages):
    tab.visit(pages["ten"])
    column = (
        "[...document.querySelectorAll('table.sortable thead th')].findIndex((one) => "
        "one.textContent === 'value')"
    )
    keys = (
        "[...document.querySelector('table.sortable').tBodies[0].rows].map((row) => "
        f"Number(row.cells[{column}].dataset.key))"
    )
    before = tab.js(keys)
    tab.js(f"document.querySelectorAll('table.sortable thead button')[{column}].click()")
    assert tab.js(keys) == sorted(before) != before
    tab.js(f"document.querySelectorAll('table.sortable thead button')[{column}].click()")
    assert tab.js(keys) == sorted(before, reverse=True)
    assert (
        tab.js(
            "document.querySelectorAll('table.sortable thead "
            f"th')[{column}].getAttribute('aria-sort')"
        )
        == "descending"
    )


def test_dark_follows_the_reader_at_once(tab, pages):
    tab.visit(pages["one"])
    colour = "document.querySelector('[data-chart=clip] .js-line').style.stroke"
    ground = "getComputedStyle(document.body).backgroundColor"
    light = tab.js(f"[{colour}, {ground}]")
    tab.media("dark")
    tab.wait(f"{colour} !== {light[0]!r}")
    assert tab.js(f"[{colour}, {ground}]") == ["rgb(102, 164, 249)", "rgb(22, 25, 29)"]
    assert light == ["rgb(2, 89, 165)", "rgb(255, 255, 255)"]


def test_print_shows_the_pictures_on_white(tab, pages):
    tab.visit(pages["one"])
    tab.media("dark", "print")
    visible = (
        "[...document.querySelectorAll('{}')].filter((one) => "
        "one.getBoundingClientRect().height > 50).length"
    )
    count = tab.js("document.querySelectorAll('figure').length")
    assert tab.js(visible.format("img.still")) == count and tab.js(visible.format(".plot")) == 0
    assert tab.js(
        "[...document.querySelectorAll('img.still')].every((one) => one.complete && "
        "one.naturalWidth > 100)"
    )
    assert tab.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    tab.media("light")
    pdf = tab.pdf()
    assert pdf.startswith(b"%PDF") and 2 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 8
    drawn = b"".join(_inflated(pdf))
    assert len(drawn) > 50_000  # the pictures are drawn as paths, not left out


def _inflated(pdf):
    for stream in re.findall(rb"stream\r?\n(.*?)\r?\nendstream", pdf, re.DOTALL):
        try:
            yield zlib.decompress(stream)
        except zlib.error:
            continue


def test_without_a_script_the_pictures_stand_in(tab, pages):
    tab.media("light")
    tab.send("Emulation.setScriptExecutionDisabled", value=True)
    try:
        tab.size(1280)
        tab.open(pages["one"], until="true")
        shown = tab.js(
            "[...document.querySelectorAll('img.still')].filter((one) => "
            "one.getBoundingClientRect().height > 50).length"
        )
        assert shown == tab.js("document.querySelectorAll('figure').length") > 5
    finally:
        tab.send("Emulation.setScriptExecutionDisabled", value=False)


def test_numbers_are_in_tables_that_have_names(tab, pages):
    tab.visit(pages["one"])
    tables = tab.js(
        "[...document.querySelectorAll('figure details table')].map((one) => "
        "[one.caption.textContent, one.rows.length])"
    )
    assert len(tables) == tab.js("document.querySelectorAll('figure').length")
    assert all(caption and rows > 1 for caption, rows in tables)


@pytest.mark.slow
def test_two_hundred_runs_draw(tab, tmp_path, monkeypatch):
    monkeypatch.setattr("zetaclip.report.page.picture", lambda chart: "data:,")
    runs = [
        invented(tmp_path / f"run-{seed}", seed=seed, epochs=5, ledger=False) for seed in range(200)
    ]
    tab.size(1280)
    tab.open(write_report(runs, tmp_path / "many.html", verify=False))
    assert tab.js("document.querySelector('table.sortable').tBodies[0].rows.length") == 200
    assert all(tab.js(MARKS).values()) and tab.console == [] and tab.js(CUT_OFF) == []


def test_a_live_page_renews_itself(tab, tmp_path, monkeypatch):
    monkeypatch.setattr("zetaclip.report.live.WAIT", 0.2)
    monkeypatch.setattr("zetaclip.report.page.WAIT", 0.2)
    monkeypatch.setattr("zetaclip.report.live.BUDGET", 1.0)
    run = invented(tmp_path / "run", epochs=3, state="running", ledger=False)
    probes = (run / "probes.jsonl").read_text()
    (run / "probes.jsonl").unlink()
    tab.media("light")
    tab.size(1280)
    with serve([run]) as address:
        tab.open(address)
        tab.js("window.same = 'page'")
        charts = "[...document.querySelectorAll('figure')].map((one) => one.dataset.chart)"
        assert "zeta" not in tab.js(charts)
        tab.js("document.querySelector('[data-chart=epsilon] details').open = true")
        append(
            run / "metrics.jsonl",
            {"epoch": 4, "step": 40, "epsilon": 2.0, "metric": 0.97, "accuracy": 0.97, "clip": 1.0},
        )
        dump(run / "status.json", status("running", 40, 120, epsilon=2.0))
        tab.wait(
            "document.querySelector('[data-chart=metric-accuracy] .plot').data[0].x.length === 4"
        )
        tab.wait("document.querySelector('.sentence').textContent.includes('97.0')")
        assert tab.js("document.querySelector('[data-chart=epsilon] details').open")
        assert (
            tab.js("document.querySelectorAll('[data-chart=epsilon] details tbody tr').length") == 4
        )
        (run / "probes.jsonl").write_text(probes)
        tab.wait(
            f"({charts}).includes('zeta') && "
            "document.querySelectorAll('figure:not(.drawn)').length === 0"
        )
        dump(run / "status.json", status("running", 40, 120) | {"pid": 2**22 + 1})
        tab.wait(
            "document.querySelector('[data-part=summary]').textContent.includes('The run "
            "stopped at step 40 of 120')"
        )
        assert "--resume" in tab.js("document.querySelector('[data-part=summary]').textContent")
        dump(run / "result.json", result())
        tab.wait(
            f"({charts}).includes('reliability') && "
            "document.querySelector('.state').textContent === 'finished'"
        )
        assert tab.js("window.same") == "page"  # never loaded again
        assert tab.console == [] and tab.js(CUT_OFF) == []
        assert {
            address.rpartition("/")[2] for address in tab.requests if address.startswith("http")
        } == {
            "",
            "data.json",
        }
    tab.wait("document.getElementById('live').textContent.startsWith('no longer live')")


def test_a_live_page_of_a_run_that_really_trains(tab, tmp_path, monkeypatch):
    monkeypatch.setattr("zetaclip.report.live.WAIT", 0.2)
    monkeypatch.setattr("zetaclip.report.page.WAIT", 0.2)
    monkeypatch.setattr("zetaclip.report.live.BUDGET", 1.0)
    training = threading.Thread(
        target=trained, args=(tmp_path / "run",), kwargs={"epochs": 6, "pause": 0.3}
    )
    training.start()
    while not (tmp_path / "run" / "config.json").exists():
        assert training.is_alive()
        time.sleep(0.05)
    try:
        with serve([tmp_path]) as address:
            tab.open(address, until="true")
            tab.wait("document.querySelector('.state').textContent === 'finished'", 60)
            tab.wait(
                "document.querySelector('[data-chart=metric-accuracy] .plot').data[0].x.length "
                "=== 6"
            )
            assert tab.console == []
    finally:
        training.join()


def test_bad_input_still_draws(tab, tmp_path, monkeypatch):
    monkeypatch.setattr("zetaclip.report.page.picture", lambda chart: "data:,")
    run = invented(tmp_path / "run")
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[:-30])
    probes = [
        {"step": 5, "layers": {"a": {"eigenvalues": [None, "x", -1]}, "b": 3}},
        {"step": 9, "layers": None, "zeta": "?"},
    ]
    lines(run / "probes.jsonl", probes)
    tab.size(390, mobile=True)
    tab.open(write_report([run], verify=False))
    assert tab.console == [] and tab.js(CUT_OFF) == []
    assert "cut off and left out" in tab.js("document.body.textContent")
