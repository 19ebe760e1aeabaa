"""Grafana dashboards as JSON: panels laid out in rows, with the same units, variables and filters everywhere.

What they show stands in dashboards_content.py; `laddertron metrics --dashboards DIR` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

PanelKind = Literal["timeseries", "stat", "heatmap", "status-history", "state-timeline", "bargauge"]
WIDTH = 24
VARIABLES = ("deployment", "replica", "node", "rank")
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Query:
    """One expression; `legend` may hold {{labels}}."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """`unit` is Grafana's name of it. `steps`: (from value, colour) thresholds beyond green. `stack`: areas on top of
    one another. `top`: the axis ends here, `floor`: it begins here (None: where the values do)."""

    title: str
    kind: PanelKind
    unit: str
    queries: tuple[Query, ...]
    help: str = ""
    width: int = 8
    height: int = 8
    steps: tuple[tuple[float, str], ...] = ()
    stack: bool = False
    top: float | None = None
    floor: float | None = 0.0
    names: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PanelRow:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """`name` is the file's and the address's, `others` are linked from the top."""

    name: str
    title: str
    rows: tuple[PanelRow, ...]


def to_json(board: Board, others: Sequence[Board] = ()) -> dict[str, Any]:
    """The dashboard as Grafana provisions it."""
    panels: list[dict[str, Any]] = []
    y = number = 0
    for row in board.rows:
        number += 1
        place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
        panels.append(
            {"id": number, "type": "row", "title": row.title, "collapsed": False, "panels": [], "gridPos": place}
        )
        y, x, tallest = y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                y, x, tallest = y + tallest, 0, 0
            number += 1
            place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            panels.append(_panel(panel, number, place))
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    links = [
        {
            "title": other.title,
            "type": "link",
            "url": f"/d/laddertron-{other.name}",
            "keepTime": True,
            "includeVars": True,
        }
        for other in others
        if other is not board
    ]
    return {
        "uid": f"laddertron-{board.name}",
        "title": f"laddertron / {board.title}",
        "tags": ["laddertron"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": [_restarts()]},
        "templating": {"list": _variables()},
        "links": links,
        "panels": panels,
    }


def write_all(boards: Sequence[Board], folder: Path) -> list[Path]:
    """Each board as a file of its own; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for board in boards:
        path = folder / f"{board.name}.json"
        path.write_text(json.dumps(to_json(board, boards), indent=1) + "\n")
        written.append(path)
    return written


def expressions(board: Mapping[str, Any]) -> list[str]:
    """Every expression of a dashboard's JSON, its variables' and annotations' included."""
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    return found + [annotation["expr"] for annotation in board["annotations"]["list"]]


def _restarts() -> dict[str, Any]:
    return {
        "name": "relaunches",
        "datasource": _SOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'increase(laddertron_engine_restarts_total{deployment=~"$deployment"}[1m]) > 0',
        "titleFormat": "relaunch: {{reason}}",
        "step": "15s",
    }


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "refresh": 1}
    out: list[dict[str, Any]] = [source]
    given: list[str] = []
    for name in VARIABLES:
        where = ", ".join(f'{other}=~"${other}"' for other in given)
        query = f"label_values(laddertron_rank_up{{{where}}}, {name})"
        out.append(
            {
                "name": name,
                "label": name,
                "type": "query",
                "datasource": _SOURCE,
                "definition": query,
                "query": {"query": query, "refId": name},
                "refresh": 2,
                "sort": 3,
                "multi": True,
                "includeAll": True,
                "allValue": ".*",
                "current": {"text": ["All"], "value": ["$__all"]},
            }
        )
        given.append(name)
    return out


def _panel(panel: Panel, number: int, place: Mapping[str, int]) -> dict[str, Any]:
    heat = panel.kind == "heatmap"
    targets = [
        {
            "refId": chr(ord("A") + i),
            "datasource": _SOURCE,
            "expr": query.expr,
            "legendFormat": "{{le}}" if heat else query.legend,
            "format": "heatmap" if heat else "time_series",
            "instant": False,
            "range": True,
        }
        for i, query in enumerate(panel.queries)
    ]
    colours: list[dict[str, Any]] = [{"color": "green", "value": None}]
    colours += [{"color": colour, "value": value} for value, colour in panel.steps]
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "thresholds": {"mode": "absolute", "steps": colours},
        "custom": _look(panel),
    }
    if panel.floor is not None:
        defaults["min"] = panel.floor
    if panel.top is not None:
        defaults["max"] = panel.top
    if panel.names:
        texts = {str(value): {"text": text, "index": i} for i, (value, text) in enumerate(panel.names.items())}
        defaults["mappings"] = [{"type": "value", "options": texts}]
    if panel.kind in ("status-history", "bargauge"):
        defaults["color"] = {"mode": "thresholds" if panel.steps else "continuous-GrYlRd"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": _SOURCE,
        "gridPos": dict(place),
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel),
    }


def _look(panel: Panel) -> dict[str, Any]:
    if panel.kind != "timeseries":
        return {}
    look: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 40 if panel.stack else 8, "showPoints": "never"}
    if panel.stack:
        look["stacking"] = {"mode": "normal", "group": "A"}
    if panel.steps:
        look["thresholdsStyle"] = {"mode": "dashed"}
    return look


def _options(panel: Panel) -> dict[str, Any]:
    match panel.kind:
        case "timeseries":
            legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
            return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
        case "heatmap":
            return {
                "calculate": False,
                "yAxis": {"unit": panel.unit},
                "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
                "cellGap": 1,
                "tooltip": {"mode": "single", "yHistogram": True},
            }
        case "status-history" | "state-timeline":
            return {
                "showValue": "never" if not panel.names else "auto",
                "rowHeight": 0.9,
                "legend": {"showLegend": True},
            }
        case _:
            return {
                "reduceOptions": {"calcs": ["lastNotNull"]},
                "colorMode": "value",
                "graphMode": "area",
                "orientation": "horizontal" if panel.kind == "bargauge" else "auto",
            }
