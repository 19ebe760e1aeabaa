"""Draws a shipped Grafana dashboard over a span of time in a real Prometheus, by matplotlib: the panels' own queries,
units, thresholds and places. Grafana itself is not run."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy
from monitoring_queries import BOARDS, filled_in
from served_daemon import ask

matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

Panel = dict[str, Any]
RATE_INTERVAL = "20s"
"""What Grafana would choose for $__rate_interval grows with the span shown; a scrape is a second here."""
_SAMPLES = 240
_COLUMNS, _ROW_IN, _WIDTH_IN = 24, 0.3, 14.0
_COLORS = {"red": "#c4342b", "yellow": "#d9a300", "green": "#419c59"}
_PLAIN = "#2f4b7c"
_UNITS = {
    "percentunit": (100.0, " %"), "s": (1.0, " s"), "ops": (1.0, "/s"), "reqps": (1.0, "/s"), "Bps": (1e-6, " MB/s"),
    "bytes": (2.0**-20, " MiB"), "hertz": (1e-9, " GHz"), "celsius": (1.0, " °C"), "watt": (1.0, " W"),
}  # fmt: skip
"""Factor and name of each of Grafana's units that the dashboards use."""


class Series(NamedTuple):
    """A legend's name, seconds since the beginning, and values of the same length."""

    name: str
    times: list[float]
    values: list[float]


def draw(prometheus: str, board: str, start: float, end: float, path: Path) -> list[str]:
    """Writes the dashboard named `board` (of configs/monitoring/grafana) as a PNG, without last sections that have no
    data; returns the titles of panels without any. `start`, `end`: seconds of the epoch. Raises URLError where
    Prometheus refuses a query."""
    drawn, empty = list[tuple[Panel, list[Series]]](), list[str]()
    for section in _sections(BOARDS[board]["panels"]):
        found = [
            [one for t in panel.get("targets", ()) for one in _range(prometheus, t, start, end)] for panel in section
        ]
        empty += [p["title"] for p, series in zip(section, found, strict=True) if p["type"] != "row" and not series]
        if any(found):
            drawn += zip(section, found, strict=True)
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel, _ in drawn)
    figure = pyplot.figure(figsize=(_WIDTH_IN, rows * _ROW_IN), dpi=90)
    for panel, series in drawn:
        place = panel["gridPos"]
        left, top = place["x"] / _COLUMNS, 1.0 - place["y"] / rows
        if panel["type"] == "row":
            figure.text(left + 0.005, top - 0.5 / rows, panel["title"], fontsize=11, weight="bold", va="center")
            continue
        inset = (left + 0.04, top - (place["h"] - 0.9) / rows, place["w"] / _COLUMNS - 0.05, (place["h"] - 2.0) / rows)
        axes = figure.add_axes(inset)
        axes.set_title(panel["title"], fontsize=8, loc="left")
        axes.tick_params(labelsize=6)
        _KINDS[panel["type"]](axes, panel, series, end - start)
    figure.savefig(path)
    pyplot.close(figure)
    return empty


def _sections(panels: list[Panel]) -> list[list[Panel]]:
    """The panels of each row's title, from the top; no text."""
    sections = list[list[Panel]]()
    for panel in sorted(panels, key=lambda panel: panel["gridPos"]["y"]):
        if panel["type"] == "row" or not sections:
            sections.append([])
        if panel["type"] != "text":
            sections[-1].append(panel)
    return sections


def _range(prometheus: str, target: dict[str, str], start: float, end: float) -> Iterator[Series]:
    """A target's series over the span, named by its legend."""
    expression = filled_in(target["expr"], RATE_INTERVAL, plan="0")
    step = max(1.0, (end - start) / _SAMPLES)
    text = urllib.parse.urlencode({"query": expression, "start": start, "end": end, "step": step})
    for row in ask(f"{prometheus}/api/v1/query_range?{text}")["data"]["result"]:
        labels: dict[str, str] = row["metric"]
        legend = target.get("legendFormat", "")
        name = re.sub(r"{{(\w+)}}", lambda label, labels=labels: labels.get(label[1], ""), legend)  # type: ignore[misc]
        numbers = [(float(when) - start, float(value)) for when, value in row["values"]]
        yield Series(name, [when for when, _ in numbers], [value for _, value in numbers])


def _color(panel: Panel, value: float) -> str:
    """By the panel's thresholds."""
    color = _PLAIN
    for step in panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", ()):
        if step["value"] is None or value >= step["value"]:
            color = _COLORS.get(step["color"], _PLAIN)
    return color


def _scale(panel: Panel) -> tuple[float, str]:
    """Factor and suffix of the panel's unit."""
    return _UNITS.get(panel["fieldConfig"]["defaults"].get("unit", "none"), (1.0, ""))


def _stat(axes: Axes, panel: Panel, series: list[Series], _: float) -> None:
    """The last value of each series."""
    factor, unit = _scale(panel)
    values = [f"{one.name} {one.values[-1] * factor:,.3g}{unit}".strip() for one in series if one.values]
    color = _color(panel, series[0].values[-1]) if values else _PLAIN
    axes.text(0.5, 0.5, " ".join(values) or "no data", fontsize=14, color=color, ha="center", va="center")
    axes.axis("off")


def _lines(axes: Axes, panel: Panel, series: list[Series], span_s: float) -> None:
    factor, unit = _scale(panel)
    for one in series:
        axes.plot(one.times, [value * factor for value in one.values], linewidth=1.0, label=one.name)
    axes.set_xlim(0, span_s)
    limits = panel["fieldConfig"]["defaults"]
    if "min" in limits:
        axes.set_ylim(0, limits["max"] * factor if "max" in limits else 1.05 * axes.get_ylim()[1])
    axes.set_ylabel(unit.strip(), fontsize=7)
    if any(one.name for one in series):
        axes.legend(fontsize=6, loc="upper left", ncols=2, framealpha=0.6)


def _bands(axes: Axes, panel: Panel, series: list[Series], span_s: float) -> None:
    """A row for each series, coloured by its thresholds where it has a value."""
    step = max(1.0, span_s / _SAMPLES)
    for row, one in enumerate(series):
        colors = [_color(panel, value) for value in one.values]
        axes.broken_barh([(when, step) for when in one.times], (row - 0.4, 0.8), facecolors=colors)
    axes.set_yticks(range(len(series)), [one.name for one in series])
    axes.tick_params(axis="y", direction="in", pad=-8, labelsize=7 if len(series) <= 8 else 4)
    for label in axes.get_yticklabels():
        label.set_horizontalalignment("left")
    axes.set_xlim(0, span_s)


def _heat(axes: Axes, panel: Panel, series: list[Series], span_s: float) -> None:
    """Counts of each bucket, darker for more: a series is a cumulative bucket named by its upper bound."""
    del panel
    buckets = sorted((one for one in series if one.values), key=lambda one: float(one.name))
    if not buckets:
        return
    counts = numpy.diff([one.values for one in buckets], axis=0, prepend=0.0)
    axes.pcolormesh(buckets[0].times, range(len(buckets)), counts, cmap="Blues", shading="nearest")
    axes.set_yticks(range(len(buckets)), [one.name for one in buckets])
    axes.set_xlim(0, span_s)


_KINDS = {"heatmap": _heat, "stat": _stat, "timeseries": _lines, "status-history": _bands, "state-timeline": _bands}
