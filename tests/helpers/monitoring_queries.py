"""What the shipped dashboards and rules ask Prometheus."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

MONITORING = Path(__file__).resolve().parents[2] / "configs/monitoring"
BOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted((MONITORING / "grafana").glob("*.json"))
}


def filled_in(expression: str, rate_interval: str = "1m", plan: str = "1") -> str:
    """With Grafana's variables: `All` of every choice, and these."""
    text = re.sub(r"\$(deployment|replica|node|rank)\b", ".*", expression)
    return text.replace("$__rate_interval", rate_interval).replace("$plan", plan)


def panel_queries() -> list[tuple[str, str]]:
    """(dashboard, expression) of every panel and annotation, as Prometheus is asked."""
    found = []
    for name, board in BOARDS.items():
        expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
        expressions += [annotation["expr"] for annotation in board["annotations"]["list"]]
        found += [(name, filled_in(expression)) for expression in expressions]
    return found


def rule_selectors() -> list[tuple[str, str]]:
    """(rule, selector) of everything that the shipped rules read: their comparisons are empty while all is well."""
    rules = yaml.safe_load((MONITORING / "alerts.yml").read_text())
    found = []
    for group in rules["groups"]:
        for rule in group["rules"]:
            name = rule.get("alert") or rule["record"]
            for selector in re.findall(r"\b((?:laddertron[_:]|up\b)[a-z0-9_:]*(?:\{[^}]*\})?)", rule["expr"]):
                found.append((name, selector))
    return found
