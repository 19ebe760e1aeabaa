"""Draws Grafana's overview from a Prometheus' data, for docs/pictures/overview.png. Grafana itself is not needed: each
panel's queries are asked over the time of a run, and matplotlib draws them at the panel's place.

    python tools/benchmarks/dashboard_picture.py record http://127.0.0.1:9090 --minutes 3 --plan 600
    python tools/benchmarks/dashboard_picture.py draw
"""

from __future__ import annotations

import json
import re
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import click
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
BOARD = ROOT / "configs/monitoring/grafana/overview.json"
DATA, PICTURE = ROOT / "docs/pictures/overview.json", ROOT / "docs/pictures/overview.png"
UNITS = {"percentunit": (100.0, " %"), "s": (1.0, " s"), "ops": (1.0, " /s"), "reqps": (1.0, " /s")}
COLORS = {"green": "#3f9b57", "yellow": "#d9a400", "red": "#c4352b"}
STEP_S = 2


@click.group()
def main() -> None:
    pass


@main.command()
@click.argument("prometheus")
@click.option("--minutes", type=float, default=3.0)
@click.option("--plan", default="0", help="Value of the dashboard's field: plan's tokens/s.")
def record(prometheus: str, minutes: float, plan: str) -> None:
    """Asks the queries of all panels over the last minutes."""
    end = time.time()
    begin = end - 60 * minutes
    series = {}
    for expression in {target["expr"] for panel in panels() for target in panel.get("targets", ())}:
        text = re.sub(r"\$(deployment|replica|node|rank)\b", ".*", expression)
        text = text.replace("$__rate_interval", "15s").replace("$plan", plan)
        query = urllib.parse.urlencode({"query": text, "start": begin, "end": end, "step": STEP_S})
        with urllib.request.urlopen(f"{prometheus}/api/v1/query_range?{query}") as answer:
            series[expression] = json.load(answer)["data"]["result"]
    DATA.write_text(json.dumps({"begin": begin, "end": end, "series": series}))


@main.command()
def draw() -> None:
    data = json.loads(DATA.read_text())
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels())
    figure = Figure(figsize=(14, rows * 0.3))
    for panel in panels():
        at = panel["gridPos"]
        box = [at["x"] / 24, 1 - (at["y"] + at["h"]) / rows, at["w"] / 24, at["h"] / rows]
        if panel["type"] == "row":
            figure.text(0.005, box[1] + box[3] / 2, panel["title"], fontsize=11, weight="bold", va="center")
            continue
        if panel["type"] == "text":
            continue
        pad = (0.012, 0.006) if panel["type"] == "stat" else (0.045, 0.016)
        axes = figure.add_axes((box[0] + pad[0], box[1] + pad[1], box[2] - pad[0] - 0.012, box[3] - pad[1] - 0.012))
        axes.set_title(panel["title"], fontsize=7.5, loc="left")
        axes.tick_params(labelsize=6)
        lines_drawn = [
            (_label(target["legendFormat"], series["metric"]), series["values"])
            for target in panel["targets"]
            for series in data["series"][target["expr"]]
        ]
        {"stat": _stat, "timeseries": _lines}.get(panel["type"], _cells)(axes, panel, lines_drawn, data["begin"])
    figure.savefig(PICTURE, dpi=90, metadata={"Software": None})


def panels() -> list[dict[str, Any]]:
    every: list[dict[str, Any]] = json.loads(BOARD.read_text())["panels"]
    return every


def _label(legend: str, metric: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: metric.get(match[1], ""), legend)


def _color(panel: dict[str, Any], value: float) -> str:
    steps = panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])
    passed = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return COLORS[passed[-1]] if passed else "#33507a"


def _stat(axes: Any, panel: dict[str, Any], series: list[Any], begin: float) -> None:
    factor, unit = UNITS.get(panel["fieldConfig"]["defaults"]["unit"], (1.0, ""))
    last = [(label, float(values[-1][1])) for label, values in series]
    text = " ".join(f"{label} {_short(value * factor)}{unit}".strip() for label, value in last) or "no data"
    axes.text(0.5, 0.5, text, fontsize=13, ha="center", va="center", color=_color(panel, last[0][1] if last else 0.0))
    axes.axis("off")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def _lines(axes: Any, panel: dict[str, Any], series: list[Any], begin: float) -> None:
    factor, unit = UNITS.get(panel["fieldConfig"]["defaults"]["unit"], (1.0, ""))
    for label, values in series:
        axes.plot([at - begin for at, _ in values], [float(value) * factor for _, value in values], lw=1, label=label)
    axes.set_ylabel(unit.strip(), fontsize=6)
    axes.set_ylim(bottom=0 if "min" in panel["fieldConfig"]["defaults"] else None)
    if series:
        axes.legend(fontsize=5.5, frameon=False, loc="upper left", ncols=2)


def _cells(axes: Any, panel: dict[str, Any], series: list[Any], begin: float) -> None:
    """One row a series, each cell in its threshold's colour."""
    for number, (label, values) in enumerate(series):
        for at, value in values:
            axes.barh(number, STEP_S, left=at - begin, color=_color(panel, float(value)))
        axes.text(1, number, label, fontsize=7, va="center")
    axes.set_yticks([])
    axes.set_xlim(left=0)


if __name__ == "__main__":
    main()
