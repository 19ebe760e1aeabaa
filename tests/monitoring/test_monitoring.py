"""Rules, dashboards, runbook and catalogue speak of the same series; promtool agrees."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from laddertron.engine.metrics.catalogue import CATALOGUE, PREFIX
from monitoring_queries import BOARDS, MONITORING, panel_queries, rule_selectors

ROOT = Path(__file__).resolve().parents[2]
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}


def known_names() -> set[str]:
    """What /metrics may hold, histograms' parts included, and what the rules record."""
    names = set(RECORDED)
    for series in CATALOGUE.values():
        parts = ("_bucket", "_sum", "_count") if series.kind == "histogram" else ("",)
        names |= {series.full_name + part for part in parts}
    return names


def names_in(expression: str) -> set[str]:
    return set(re.findall(rf"\b{PREFIX[:-1]}[_:][a-z0-9_:]+", expression))


def test_rules_and_panels_read_only_what_there_is() -> None:
    expressions_of_all = [rule["expr"] for rule in RULES] + [text for _, text in panel_queries()]
    unknown = {name for text in expressions_of_all for name in names_in(text)} - known_names()
    assert not unknown
    assert len(panel_queries()) > 100
    assert {name for name, _ in panel_queries()} == BOARDS.keys()
    assert {name for name, _ in rule_selectors()} == {rule.get("alert") or rule["record"] for rule in RULES}


def test_labels_in_expressions_exist() -> None:
    """A filter or a legend on a label that a series does not have would silently show nothing."""
    labels = {label for series in CATALOGUE.values() for label in series.labels}
    allowed = labels | {"deployment", "instance", "job", "le", "alertname", "alertstate", "severity"}
    for _, text in [*panel_queries(), *((rule.get("alert"), rule["expr"]) for rule in RULES)]:
        used = set(re.findall(r"([a-z_]+)\s*(?:=~|!=|!~|=)\s*\"", text))
        for by in re.findall(r"\b(?:by|on|without)\s*\(([^)]*)\)", text):
            used |= {name.strip() for name in by.split(",") if name.strip()}
        assert used <= allowed, (text, used - allowed)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_says_what_and_what_to_do(rule: dict[str, Any]) -> None:
    """A summary, a severity, a runbook's section that exists, and a test that fires it and one that does not."""
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["summary"]
    anchor = rule["annotations"]["runbook_url"]
    sections = {
        f"docs/runbook.md#{line[3:].strip().lower()}"
        for line in (ROOT / "docs/runbook.md").read_text().splitlines()
        if line.startswith("## ")
    }
    assert anchor == f"docs/runbook.md#{rule['alert'].lower()}"
    assert anchor in sections
    cases = yaml.safe_load((MONITORING / "alerts_test.yml").read_text())["tests"]
    fired = [
        bool(case["exp_alerts"])
        for test in cases
        for case in test["alert_rule_test"]
        if case["alertname"] == rule["alert"]
    ]
    assert sorted(fired) == [False, True]


def test_the_runbook_has_no_section_without_an_alert() -> None:
    sections = re.findall(r"^## (.+)$", (ROOT / "docs/runbook.md").read_text(), re.MULTILINE)
    assert sections == [rule["alert"] for rule in sorted(ALERTS, key=lambda rule: sections.index(rule["alert"]))]


@pytest.mark.parametrize("words", [("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")])
def test_promtool_agrees_with_the_rules(words: tuple[str, ...]) -> None:
    """alerts_test.yml fires every alert by its fault, and shows it quiet before."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run([tool, *words], cwd=MONITORING, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_shipped_configurations_parse_and_stay_on_loopback() -> None:
    files = sorted(MONITORING.rglob("*.yml"))
    assert len(files) >= 6
    for path in files:
        assert yaml.safe_load(path.read_text()) is not None
        assert not re.search(r"\b0\.0\.0\.0\b", path.read_text()), path
