"""Charts of what `bench` measured, as SVG that stands alone: legible on light and dark pages, and to screen readers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

SCHEMA = "mlx-audit/bench/1"
"""Of the results."""

_LEFT, _TOP, _BOTTOM, _GAP = 46.0, 78.0, 46.0, 22.0
_HEIGHT = 330.0
_SLOT = 30.0
"""Width of one point with the number above it."""

_STYLE = """
text{font:11px system-ui,sans-serif;fill:#1f2328}.m{text-anchor:middle}
.n{font-size:10px;text-anchor:middle;paint-order:stroke;stroke:#fff;stroke-width:3px}
.h{font-size:13px;font-weight:600}.e{text-anchor:end}.page{fill:#fff}.grid{stroke:#d8dee4}.base{stroke:#57606a}
.s0{fill:#0550ae;stroke:#0550ae}.s1{fill:#bc4c00;stroke:#bc4c00}.s2{fill:#6e7781;stroke:#6e7781}
.s3{fill:#8250df;stroke:#8250df}.w{stroke-width:1.6}
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.page{fill:#0d1117}.n{stroke:#0d1117}
.grid{stroke:#30363d}.base{stroke:#9198a1}
.s0{fill:#79c0ff;stroke:#79c0ff}.s1{fill:#ffa657;stroke:#ffa657}.s2{fill:#9198a1;stroke:#9198a1}
.s3{fill:#d2a8ff;stroke:#d2a8ff}}
""".strip()


class Point(NamedTuple):
    """One number with its interval, if it has one.

    Attributes:
        place: Index of the category along the x axis.
        series: Index of the series.
    """

    place: int
    series: int
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Panel:
    """One model: its categories along the x axis, and its points."""

    title: str
    categories: Sequence[str]
    points: Sequence[Point]


@dataclass(frozen=True)
class Chart:
    """Panels side by side over one y axis.

    Attributes:
        title: What is shown.
        note: How to read it; the second line.
        axis: Below each panel.
        series: Names, for the key.
        panels: One a model.
        base: A line to compare with, or None; with it, the y axis need not begin at 0.
    """

    title: str
    note: str
    axis: str
    series: Sequence[str]
    panels: Sequence[Panel]
    base: float | None = None

    def svg(self) -> str:
        """Return the chart as an SVG document."""
        scale = self._scale()
        widths = [self._panel_width(panel) for panel in self.panels]
        width = max(_LEFT + sum(widths) + _GAP * len(widths), 7 * len(self.note))
        body, left = [*self._head()], _LEFT
        for panel, panel_width in zip(self.panels, widths, strict=True):
            body += self._panel(panel, left, panel_width, scale)
            left += panel_width + _GAP
        body += [
            f'<text class="e" x="{_LEFT - 6:g}" y="{scale.at(t) + 4:.1f}">{t:g}</text>' for t in scale.ticks
        ]
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{_HEIGHT:g}" '
            f'viewBox="0 0 {width:g} {_HEIGHT:g}" role="img" aria-labelledby="t d">'
        )
        page = [
            head,
            f'<title id="t">{escape(self.title)}</title>',
            f'<desc id="d">{escape(self._described())}</desc><style>{_STYLE}</style>',
            f'<rect class="page" width="{width:g}" height="{_HEIGHT:g}"/>',
            *body,
            "</svg>\n",
        ]
        return "\n".join(page)

    def _panel_width(self, panel: Panel) -> float:
        return max(len(panel.categories) * (_SLOT * len(self.series) + 10), 6.5 * len(panel.title), 120)

    def _head(self) -> Iterator[str]:
        yield f'<text class="h" x="12" y="20">{escape(self.title)}</text>'
        yield f'<text x="12" y="37">{escape(self.note)}</text>'
        left = 12.0
        for index, name in enumerate(self.series):
            yield f'<circle class="s{index}" cx="{left + 4:g}" cy="50" r="4"/>'
            yield f'<text x="{left + 13:g}" y="54">{escape(name)}</text>'
            left += 30 + 7 * len(name)

    def _panel(self, panel: Panel, left: float, width: float, scale: _Scale) -> Iterator[str]:
        right = left + width
        yield f'<text class="m" x="{left + width / 2:.1f}" y="{_TOP - 6:g}">{escape(panel.title)}</text>'
        for tick in scale.ticks:
            yield _line("base" if tick == self.base else "grid", left, scale.at(tick), right, scale.at(tick))
        step = width / max(1, len(panel.categories))
        for index, name in enumerate(panel.categories):
            x = left + (index + 0.5) * step
            yield f'<text class="m" x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16:g}">{escape(name)}</text>'
        yield f'<text class="m" x="{left + width / 2:.1f}" y="{_HEIGHT - 10:g}">{escape(self.axis)}</text>'
        for point in panel.points:
            shift = (point.series - (len(self.series) - 1) / 2) * _SLOT
            yield from self._point(panel, point, left + (point.place + 0.5) * step + shift, scale)

    def _point(self, panel: Panel, point: Point, x: float, scale: _Scale) -> Iterator[str]:
        yield f'<g class="s{point.series}"><title>{escape(self._sentence(panel, point))}</title>'
        if point.low < point.high:
            yield _line("w", x, scale.at(point.low), x, scale.at(point.high))
        yield f'<circle cx="{x:.1f}" cy="{scale.at(point.value):.1f}" r="4"/></g>'
        yield f'<text class="n" x="{x:.1f}" y="{scale.at(point.high) - 7:.1f}">{point.value:.2f}</text>'

    def _sentence(self, panel: Panel, point: Point) -> str:
        between = f" ({point.low:.2f} to {point.high:.2f})" if point.low < point.high else ""
        place = f"{self.axis} {panel.categories[point.place]}"
        return f"{panel.title}, {place}, {self.series[point.series]}: {point.value:.2f}{between}"

    def _described(self) -> str:
        sentences = [self._sentence(panel, point) for panel in self.panels for point in panel.points]
        return f"{self.note} " + "; ".join(sentences) + "."

    def _scale(self) -> _Scale:
        points = [point for panel in self.panels for point in panel.points]
        low = min((point.low for point in points), default=0.0) if self.base is not None else 0.0
        high = max((point.high for point in points), default=1.0)
        return _Scale.over(min(low, self.base or low), max(high, self.base or high))


@dataclass(frozen=True)
class _Scale:
    """From values to places on the y axis, with ticks at round numbers."""

    low: float
    high: float
    ticks: Sequence[float]

    @classmethod
    def over(cls, low: float, high: float) -> _Scale:
        raw = max(high - low, 1e-9) / 5
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if raw <= power * factor * 1.0001)
        first, last = math.floor(low / step), math.ceil(high / step)
        ticks = [round(index * step, 6) for index in range(first, last + 1)]
        return cls(ticks[0], ticks[-1], ticks)

    def at(self, value: float) -> float:
        room = _HEIGHT - _TOP - _BOTTOM - 14
        return _HEIGHT - _BOTTOM - room * (value - self.low) / (self.high - self.low)


def ratios(results: Sequence[Mapping[str, Any]]) -> Chart:
    """Return the chart of eager time over compiled time, one panel a model, one series a capacity."""
    capacities = sorted({int(cell["capacity"]) for result in results for cell in result["cells"]})
    panels = []
    for result in results:
        fills = sorted({int(cell["fill"]) for cell in result["cells"]})
        points = [
            Point(
                fills.index(cell["fill"]),
                capacities.index(cell["capacity"]),
                cell["ratio"]["mean"],
                cell["ratio"]["low"],
                cell["ratio"]["high"],
            )
            for cell in result["cells"]
        ]
        panels.append(Panel(_name(result), [f"{fill:,}" for fill in fills], points))
    return Chart(
        "Eager time over compiled time",
        "Above 1, compiled is faster. Lines: 95% intervals.",
        "tokens held",
        [f"capacity {capacity:,}" for capacity in capacities],
        panels,
        base=1.0,
    )


def milliseconds(results: Sequence[Mapping[str, Any]]) -> Chart:
    """Return the chart of milliseconds a token, one panel a model; a cell may have further ways in `others_ms`."""
    others = list(
        dict.fromkeys(
            name for result in results for cell in result["cells"] for name in cell.get("others_ms", {})
        )
    )
    series = ["eager", "compiled", *others]
    panels = []
    for result in results:
        cells = sorted(result["cells"], key=lambda cell: (cell["capacity"], cell["fill"]))
        points = []
        for place, cell in enumerate(cells):
            found = {"eager": cell["eager_ms"], "compiled": cell["compiled_ms"], **cell.get("others_ms", {})}
            points += [Point(place, series.index(name), ms, ms, ms) for name, ms in found.items()]
        panels.append(Panel(_name(result), [f"{cell['capacity']:,}" for cell in cells], points))
    return Chart("Milliseconds a token", "Less is faster.", "capacity", series, panels)


def _name(result: Mapping[str, Any]) -> str:
    return str(result.get("title") or result["model"])


def _line(name: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{name}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
