"use strict";
// Draws the charts, sorts tables, and asks for changes on a live page.
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const settings = read("zetaclip-settings");
  let figures = read("zetaclip-figures");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Map();

  // "$3" and "$ink" in a figure stand for colours of the reader's theme.
  function coloured(value, theme) {
    if (typeof value === "string")
      return value[0] === "$" && value.slice(1) in theme ? theme[value.slice(1)] : value;
    if (Array.isArray(value)) return value.map((inner) => coloured(inner, theme));
    if (value && typeof value === "object")
      return Object.fromEntries(
        Object.entries(value).map(([key, inner]) => [key, coloured(inner, theme)]),
      );
    return value;
  }

  function legendRows(lengths, width) {
    let rows = lengths.length ? 1 : 0, used = 0;
    // plotly gives every entry of a horizontal legend the width of the longest.
    const each = Math.max(0, ...lengths) * 6.8 + 52;
    for (let entry = 0; entry < lengths.length; entry++) {
      if (used && used + each > width - 20) { rows += 1; used = 0; }
      used += each;
    }
    return rows;
  }

  function draw(id) {
    const holder = document.querySelector(`figure[data-chart="${id}"]`);
    const figure = figures[id];
    if (!holder || !figure) return;
    const plot = holder.querySelector(".plot");
    const theme = settings.themes[dark.matches ? "dark" : "light"];
    const { data, layout } = coloured(figure, theme);
    const width = plot.clientWidth || holder.clientWidth || 360;
    const rows = legendRows(figure.legend, width - 60);
    const small = holder.classList.contains("third");
    const base = figure.rows ? 110 + 26 * figure.rows : small ? 270 : 300;
    const axis = {
      gridcolor: theme.grid, zerolinecolor: theme.grid,
      linecolor: theme.grid, tickcolor: theme.grid,
    };
    const full = {
      ...layout,
      autosize: true,
      height: base + 21 * rows,
      margin: { l: 12, r: 12, t: 12, b: 12 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: theme.ink },
      legend: {
        orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0,
        traceorder: "normal", font: { size: 12 },
      },
      hoverlabel: {
        bgcolor: theme.ground, bordercolor: theme.grid, font: { color: theme.ink, size: 12 },
      },
      xaxis: { ...axis, ...layout.xaxis },
      yaxis: { ...axis, ...layout.yaxis },
      uirevision: id,
    };
    const config = {
      responsive: false, displaylogo: false, displayModeBar: false,
      scrollZoom: false, doubleClick: "reset",
    };
    if (window.innerWidth <= 700) full.dragmode = false; // a finger on a chart scrolls the page
    Plotly.react(plot, data, full, config);
    holder.classList.add("drawn");
    drawn.set(id, JSON.stringify(figure));
  }

  function drawAll() {
    for (const id of Object.keys(figures)) draw(id);
  }

  // Numbers are sorted by their key, everything else as text; rows without a number go last.
  const chosen = { column: null, direction: 1 };
  function sort(table, column, direction) {
    const body = table.tBodies[0];
    const value = (row) => {
      const cell = row.cells[column];
      return "key" in cell.dataset ? Number(cell.dataset.key) : cell.textContent.trim();
    };
    const rows = [...body.rows].map((row) => [value(row), row]);
    const numeric = rows.some(([key]) => typeof key === "number");
    rows.sort(([a], [b]) => {
      if (numeric && typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
      const numbers = typeof a === "number";
      return direction * (numbers ? a - b : a.localeCompare(b, undefined, { numeric: true }));
    });
    body.append(...rows.map(([, row]) => row));
    [...table.tHead.rows[0].cells].forEach((cell, place) => {
      const name = direction > 0 ? "ascending" : "descending";
      if (place === column) cell.setAttribute("aria-sort", name);
      else cell.removeAttribute("aria-sort");
    });
  }
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const head = button.closest("th");
    if (head) {
      const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      Object.assign(chosen, { column: head.cellIndex, direction });
      sort(head.closest("table"), head.cellIndex, direction);
    } else if (button.classList.contains("copy")) {
      const text = document.getElementById(button.dataset.copy).textContent;
      const done = () => { button.textContent = "Copied"; };
      const refused = () => select(button.dataset.copy);
      if (navigator.clipboard) navigator.clipboard.writeText(text).then(done, refused);
      else refused();
    }
  });
  function select(id) {
    getSelection().selectAllChildren(document.getElementById(id));
  }

  // Replaces a part if it changed, and keeps it open and sorted as before.
  function replace(id, html) {
    const part = document.querySelector(`[data-part="${id}"]`);
    if (!part || part.dataset.html === html) return;
    const open = [...part.querySelectorAll("details")].map((one) => one.open);
    part.innerHTML = html;
    part.dataset.html = html;
    part.querySelectorAll("details").forEach((one, place) => { one.open = open[place] || false; });
    const table = part.querySelector("table.sortable");
    if (table && chosen.column !== null) sort(table, chosen.column, chosen.direction);
  }

  // There are new charts: replaces everything, and opens again what was open.
  function rebuild(html) {
    const place = (one) => {
      const home = one.closest("figure")?.dataset.chart || one.closest("section").id;
      return `${home} ${one.querySelector("summary").textContent}`;
    };
    const opened = new Set([...document.querySelectorAll("main details[open]")].map(place));
    document.querySelectorAll(".plot").forEach((plot) => Plotly.purge(plot));
    document.querySelector("main").innerHTML = html;
    for (const one of document.querySelectorAll("main details")) one.open = opened.has(place(one));
    const table = document.querySelector("table.sortable");
    if (table && chosen.column !== null) sort(table, chosen.column, chosen.direction);
  }

  let shape = settings.shape, tag = "", lost = 0;
  async function news() {
    let wait = settings.wait;
    try {
      const headers = { "If-None-Match": tag, "X-Shape": encodeURIComponent(shape) };
      const answer = await fetch("data.json", { cache: "no-store", headers });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag") || "";
        const fresh = await answer.json();
        // The page changed after the request: ask again.
        if (fresh.shape !== shape && fresh.main === undefined) tag = "";
        document.title = fresh.title;
        if (fresh.main !== undefined) {
          rebuild(fresh.main);
          shape = fresh.shape;
          figures = fresh.figures;
          drawAll();
        } else {
          for (const [id, html] of Object.entries(fresh.parts)) replace(id, html);
          figures = fresh.figures;
          for (const id of Object.keys(figures))
            if (drawn.get(id) !== JSON.stringify(figures[id])) draw(id);
        }
      }
      wait = Number(answer.headers.get("X-Wait")) || wait;
      lost = 0;
      live(answer.ok || answer.status === 304 ? "live" : `the server answers ${answer.status}`);
    } catch (error) {
      lost += 1;
      live("no longer live: the command that serves this page has ended");
      wait = Math.min(30, settings.wait * 2 ** lost);
    }
    setTimeout(news, 1000 * wait);
  }
  function live(text) {
    const place = document.getElementById("live");
    if (place && place.textContent !== text) place.textContent = text;
  }

  drawAll();
  dark.addEventListener("change", drawAll);
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return; // a phone's address bar changes the height alone
    width = window.innerWidth;
    clearTimeout(window.redraw);
    window.redraw = setTimeout(drawAll, 120);
  });
  if (settings.live) setTimeout(news, 1000 * settings.wait);
})();
