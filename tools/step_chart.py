"""Draws the first table of docs/performance.md, steps on stock PyTorch and on funcol, as SVG.

    python tools/step_chart.py

Writes docs/pictures/steps_light.svg and steps_dark.svg, which README.md and the page show, and prints the
description that stands in both as the picture's text.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "performance.md"
TITLE = "CPU time of a step in ms; less is better"
CONDITIONS = "PyTorch 2.15, one of 8 ranks, nothing is sent, one thread of a 2-core machine, small layers"

WIDTH, LABELS, TOP, ROW, BAR = 860, 330, 76, 46, 14
BARS = WIDTH - LABELS - 90  # the longest bar; what is right of it is for its numbers

THEMES = {
    "light": {"text": "#1f2328", "muted": "#59636e", "stock": "#afb8c1", "funcol": "#0b62d6"},
    "dark": {"text": "#f0f6fc", "muted": "#9ba5b0", "stock": "#5d6772", "funcol": "#5ab0ff"},
}


@dataclass(frozen=True)
class Step:
    """A row of the table: a program and milliseconds of a step of it."""

    name: str
    plain: float  # not parallel
    stock: float
    funcol: float

    @property
    def gain(self) -> str:
        return as_ratio(self.stock / self.funcol)


def as_ratio(ratio: float) -> str:
    """Returns ``ratio`` as the page writes it: ``1.62x``, ``7.5x``, ``18x``, ``1100x``."""
    if ratio < 2:
        return f"{ratio:.2f}x"
    if ratio < 10:
        return f"{ratio:.1f}x"
    last = 10 ** max(0, len(str(int(ratio))) - 2)
    return f"{round(ratio / last) * last}x"


def steps(page: Path = PAGE) -> list[Step]:
    """Returns the rows of the first table of ``page``."""
    lines = page.read_text().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| --- "))
    found = []
    for line in lines[first + 1 :]:
        if not line.startswith("|"):
            break
        name, *times = (cell.strip() for cell in line.strip("|").split("|"))
        found.append(Step(name, *map(float, times[:3])))
    return found


def description(rows: list[Step]) -> str:
    """Returns the chart in words, for readers who do not see it."""
    times = "; ".join(f"{row.name}: {row.stock} and {row.funcol}" for row in rows)
    return f"Milliseconds of a step on stock PyTorch and with funcol. {times}."


def drawn(rows: list[Step], theme: str) -> str:
    """Returns the chart as SVG: a bar a side for each row, and a tick at the time without parallelism."""
    colors = THEMES[theme]
    height = TOP + ROW * len(rows)
    scale = BARS / max(row.stock for row in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" font-family="system-ui, -apple-system, Segoe UI, '
        f'Helvetica, Arial, sans-serif" font-size="14">',
        f"<title>{escape(description(rows))}</title>",
        _text(0, 18, TITLE, colors["text"], size=17, weight=600),
        _text(0, 40, CONDITIONS, colors["muted"], size=13),
        _box(LABELS, 53, 12, 12, colors["stock"]),
        _text(LABELS + 18, 64, "stock PyTorch", colors["text"]),
        _box(LABELS + 130, 53, 12, 12, colors["funcol"]),
        _text(LABELS + 148, 64, "with funcol.install()", colors["text"]),
        _box(LABELS + 308, 51, 2, 16, colors["text"]),
        _text(LABELS + 316, 64, "the same, not parallel", colors["text"]),
    ]
    for number, row in enumerate(rows):
        top = TOP + ROW * number + 6
        parts.append(_text(LABELS - 12, top + BAR + 5, row.name, colors["text"], anchor="end"))
        for below, side in enumerate(("stock", "funcol")):
            length, y = scale * getattr(row, side), top + below * (BAR + 2)
            parts.append(_box(LABELS, y, length, BAR, colors[side]))
            parts.append(
                _text(LABELS + length + 7, y + 12, f"{getattr(row, side)}", colors["muted"], size=13)
            )
        gain_x = LABELS + scale * row.funcol + 48
        parts.append(_text(gain_x, top + BAR + 14, row.gain, colors["funcol"], weight=700))
        parts.append(_box(LABELS + scale * row.plain - 1, top - 2, 2, 2 * BAR + 6, colors["text"]))
    return "\n".join([*parts, "</svg>\n"])


def _box(x: float, y: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="1" fill="{color}"/>'


def _text(
    x: float, y: float, text: str, color: str, size: int = 14, weight: int = 400, anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def path_of(theme: str) -> Path:
    return DOCS / "pictures" / f"steps_{theme}.svg"


def main() -> None:
    rows = steps()
    for theme in THEMES:
        path_of(theme).write_text(drawn(rows, theme))
    print(description(rows))


if __name__ == "__main__":
    main()
