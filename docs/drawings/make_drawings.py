"""The drawings of the documentation: python docs/drawings/make_drawings.py

Every drawing is 480 units wide, so that its words can be read on a phone. Colours follow the
reader's light or dark setting; on the site, docs/drawings/site.css sets them.
"""

from __future__ import annotations

import math
from pathlib import Path

from zetaclip.accounting import epsilon
from zetaclip.ledger import Event

HERE = Path(__file__).parent
STYLE = """
.zc{--ink:#1b1f24;--soft:#56606b;--line:#8b96a1;--fill:#e9f0f8;--blue:#0259a5;--red:#b3261e}
@media(prefers-color-scheme:dark){
.zc{--ink:#e4e7ea;--soft:#a9b2bb;--line:#6d7883;--fill:#253140;--blue:#66a4f9;--red:#ff8a80}}
.zc text{font:15px system-ui,sans-serif;fill:var(--ink);text-anchor:middle}
.zc .s{font-size:13px;fill:var(--soft)}.zc .l{text-anchor:start}.zc .r{text-anchor:end}
.zc .b{fill:var(--blue)}.zc .x{fill:var(--red)}
.zc rect,.zc .o{fill:var(--fill);stroke:var(--blue);stroke-width:1.5}
.zc .z{fill:none;stroke:var(--line);stroke-dasharray:6 5}
.zc .a{fill:none;stroke:var(--ink);stroke-width:1.6}.zc .h{fill:var(--ink)}
.zc .n{fill:none;stroke:var(--blue);stroke-width:2.2}
.zc .m{fill:none;stroke:var(--red);stroke-width:2.2}
.zc .g{fill:none;stroke:var(--line)}.zc .d{fill:var(--line)}.zc .p{fill:var(--blue)}
"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


def box(x: float, y: float, w: float, h: float, first: str, second: str = "") -> str:
    middle = x + w / 2
    words = (
        text(middle, y + h / 2 - 4, first) + text(middle, y + h / 2 + 15, second, "s")
        if second
        else text(middle, y + h / 2 + 5, first)
    )
    return f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="7"/>{words}'


def zone(x: float, y: float, w: float, h: float) -> str:
    return f'<rect class="z" x="{x}" y="{y}" width="{w}" height="{h}" rx="10"/>'


def arrow(*points: tuple[float, float], kind: str = "a", head: str = "h") -> str:
    """A line with a head at its last point."""
    (x0, y0), (x1, y1) = points[-2:]
    length = math.hypot(x1 - x0, y1 - y0)
    ux, uy = (x1 - x0) / length, (y1 - y0) / length
    base = (x1 - 9 * ux, y1 - 9 * uy)
    sides = [(base[0] - 4.5 * uy, base[1] + 4.5 * ux), (base[0] + 4.5 * uy, base[1] - 4.5 * ux)]
    tip = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(x1, y1), *sides])
    return f'{line([*points[:-1], base], kind)}<polygon class="{head}" points="{tip}"/>'


def line(points: list[tuple[float, float]], kind: str) -> str:
    return f'<polyline class="{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def write(name: str, height: int, title: str, parts: list[str]) -> None:
    body = "\n".join(parts)
    (HERE / f"{name}.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="zc" viewBox="0 0 480 {height}" '
        f'role="img" aria-label="{title}"><title>{title}</title>'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def step() -> None:
    """The path of one training step, and what leaves it."""
    parts = [
        zone(6, 6, 468, 214),
        text(20, 30, "private: never leaves", "s l"),
        box(20, 44, 126, 58, "your records", "N of them"),
        arrow((146, 73), (177, 73)),
        box(177, 44, 126, 58, "a batch", "each joins with q"),
        arrow((303, 73), (334, 73)),
        box(334, 44, 126, 58, "gradients", "one per record"),
        arrow((397, 102), (397, 144)),
        box(334, 144, 126, 58, "clip", "to a length of C"),
        arrow((334, 173), (303, 173)),
        box(177, 144, 126, 58, "sum"),
        arrow((240, 202), (240, 252)),
        '<circle class="o" cx="240" cy="268" r="16"/>',
        text(240, 274, "+", "b"),
        text(266, 273, "noise of size σ·C", "l b"),
        arrow((240, 284), (240, 332)),
        zone(6, 304, 468, 186),
        text(462, 324, "released: anyone may see it", "s r"),
        box(177, 332, 126, 58, "divide by L", "your optimizer"),
        arrow((303, 361), (334, 361)),
        box(334, 332, 126, 58, "weights", "your model"),
        arrow((224, 268), (83, 268), (83, 348)),
        box(20, 348, 126, 42, "ledger"),
        arrow((83, 390), (83, 430)),
        box(20, 430, 126, 46, "ε", "what it has cost"),
        text(320, 436, "C can be a number, or follow", "s"),
        text(320, 454, "the weights (dotted)", "s"),
        f'<g stroke-dasharray="3 4">{line([(460, 361), (470, 361), (470, 173)], "a")}</g>',
        arrow((470, 173), (460, 173)),
    ]
    write("step", 498, "One private training step", parts)


def clipping() -> None:
    """Five gradients and the circle that holds them."""
    cx, cy, radius = 150, 96, 78
    parts = [f'<circle class="g" cx="{cx}" cy="{cy}" r="{radius}"/>']
    for degrees, length in [(20, 1.7), (75, 0.55), (130, 1.0), (200, 1.5), (300, 0.8)]:
        turn = math.radians(degrees)
        ux, uy = math.cos(turn) * radius, -math.sin(turn) * radius
        kept = min(1.0, length)
        if length > 1:
            far = [(cx + kept * ux, cy + kept * uy), (cx + length * ux, cy + length * uy)]
            parts.append(f'<g stroke-dasharray="4 4">{line(far, "m")}</g>')
        parts.append(arrow((cx, cy), (cx + kept * ux, cy + kept * uy), kind="n", head="p"))
    parts += [
        text(150, 204, "the circle has radius C", "s"),
        text(315, 40, "blue: what is kept", "l b"),
        text(315, 66, "red: what is cut off", "l x"),
        text(315, 110, "Each arrow is one", "l s"),
        text(315, 128, "record. None can pull", "l s"),
        text(315, 146, "the sum further than C.", "l s"),
    ]
    write("clipping", 220, "Clipping: every gradient ends inside a circle of radius C", parts)


def noise() -> None:
    """What one release looks like with and without one record."""
    sigma, apart = 62.0, 44.0

    def bell(middle: float) -> list[tuple[float, float]]:
        return [
            (x, 190 - 140 * math.exp(-(((x - middle) / sigma) ** 2) / 2)) for x in range(20, 461, 4)
        ]

    left, right = 240 - apart / 2, 240 + apart / 2
    parts = [
        line([(14, 190), (466, 190)], "g"),
        line(bell(left), "n"),
        line(bell(right), "m"),
        text(96, 88, "without you", "b"),
        text(384, 88, "with you", "x"),
        line([(left, 190), (left, 206)], "g"),
        line([(right, 190), (right, 206)], "g"),
        arrow((left, 202), (right, 202)),
        arrow((right, 202), (left, 202)),
        text(240, 226, "at most C apart; each bell is σ·C wide", "s"),
        text(240, 250, "Where both are likely, nobody can tell which it was.", "s"),
    ]
    write("noise", 262, "The same release with and without one record", parts)


def sampling() -> None:
    """Which records join three batches: each by its own coin."""
    import random

    draw = random.Random(4)
    parts = []
    for batch in range(3):
        y = 44 + 64 * batch
        parts.append(text(14, y + 5, f"batch {batch + 1}", "l s"))
        joined = [draw.random() < 0.25 for _ in range(20)]
        for i, chosen in enumerate(joined):
            radius, kind = (7, "p") if chosen else (4, "d")
            parts.append(f'<circle class="{kind}" cx="{92 + 17.5 * i:g}" cy="{y}" r="{radius}"/>')
        parts.append(text(466, y + 26, f"{sum(joined)} records; still divided by L = 5", "r s"))
    parts.append(text(240, 14, "20 records, q = 1/4: each record tosses its own coin", "s"))
    write("sampling", 212, "Poisson sampling of three batches", parts)


def cost() -> None:
    """ε over epochs for three levels of noise, by the PLD accountant."""
    rate, left, bottom, wide, high, largest = 256 / 60000, 60, 236, 340, 200, 5.0
    parts = []
    for value in range(0, 6):
        y = bottom - high * value / largest
        parts += [
            line([(left, y), (left + wide, y)], "g"),
            text(left - 10, y + 5, f"{value}", "r s"),
        ]
    for epochs in (0, 10, 20, 30):
        parts.append(text(left + wide * epochs / 30, bottom + 20, f"{epochs}", "s"))
    for sigma in (0.7, 1.0, 2.0):
        steps = [round(epochs / rate) for epochs in (0.25, 0.5, 1, 2, 4, 7, 10, 15, 20, 25, 30)]
        spent = [epsilon([Event(rate, sigma, count)], 1e-5, "pld") for count in steps]
        points = [
            (left + wide * count * rate / 30, bottom - high * value / largest)
            for count, value in zip(steps, spent, strict=True)
            if value <= largest
        ]
        end = points[-1]
        parts += [line(points, "n"), text(end[0] + 8, end[1] + 5, f"σ = {sigma:g}", "l b")]
    parts += [text(left - 10, 20, "ε", "r"), text(left + wide / 2, bottom + 42, "epochs", "s")]
    write("cost", 288, "ε grows with the epochs, and falls with the noise", parts)


def control() -> None:
    """The loop of the spectral controller."""
    parts = [
        box(20, 20, 180, 58, "private training", "clip at C, noise σ·C"),
        arrow((200, 49), (280, 49)),
        box(280, 20, 180, 58, "weights", "released anyway"),
        arrow((370, 78), (370, 130)),
        text(380, 110, "every K steps", "l s"),
        box(280, 130, 180, 58, "spectrum of a layer", "how fast it falls: ζ"),
        arrow((280, 159), (200, 159)),
        box(20, 130, 180, 58, "move C a little", "up if ζ is above 4"),
        arrow((110, 130), (110, 78)),
        text(120, 110, "the next C", "l s"),
    ]
    write("control", 208, "The spectral controller: weights to ζ, and ζ to C", parts)


if __name__ == "__main__":
    for draw in (step, clipping, noise, sampling, cost, control):
        draw()
