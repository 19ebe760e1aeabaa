"""The files that others run as they are: the compose file, Grafana's provisioning, the dashboards. Neither Docker nor
Grafana is needed: what they would refuse, or silently leave empty, is looked for here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from laddertron.engine.metrics.catalogue import CATALOGUE, PREFIX

MONITORING = Path(__file__).resolve().parents[2] / "configs/monitoring"
COMPOSE: dict[str, Any] = yaml.safe_load((MONITORING / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
BOARDS = sorted((MONITORING / "grafana").glob("*.json"))
GRAFANA_OWN = {"__rate_interval", "__interval", "__range", "__all_variables", "__url_time_range"}
KINDS = {"row", "text", "timeseries", "stat", "heatmap", "status-history", "state-timeline"}
UNITS = {"none", "short", "s", "bytes", "Bps", "percentunit", "ops", "reqps", "hertz", "celsius", "watt"}
"""Of Grafana's list, those that base units need: an unknown one is shown as plain text behind the number."""


def mounts(service: str) -> Iterator[tuple[str, PurePosixPath]]:
    """(source, place inside) of a service's volumes; each is read-only or a named volume."""
    for volume in SERVICES[service].get("volumes", ()):
        source, inside, *mode = volume.split(":")
        assert mode == ["ro"] or source in COMPOSE["volumes"], volume
        yield source, PurePosixPath(inside)


def on_host(service: str, inside: str) -> Path:
    """The file or folder here that a path inside the container is. Fails if none is mounted there."""
    path = PurePosixPath(inside)
    found = [(source, at) for source, at in mounts(service) if path.is_relative_to(at) and source.startswith("./")]
    assert found, f"{service}: nothing is mounted at {inside}"
    source, at = max(found, key=lambda mount: len(mount[1].parts))
    return MONITORING / source / path.relative_to(at)


@pytest.mark.parametrize("service", SERVICES)
def test_images_are_pinned_and_nobody_else_reaches_them(service: str) -> None:
    """A version to the last digit; whatever listens does so on loopback, nothing is published elsewhere."""
    given = SERVICES[service]
    assert re.fullmatch(r"[a-z0-9./-]+:v?\d+\.\d+\.\d+", given["image"]), given["image"]
    for port in given.get("ports", ()):
        assert str(port).startswith("127.0.0.1:"), port
    words = [*given.get("command", ()), *(f"{k}={v}" for k, v in given.get("environment", {}).items())]
    listening = [word for word in words if re.search(r"listen-address|HTTP_ADDR", word)]
    if given.get("network_mode") == "host":
        assert len(listening) == 1, "in the host's network the default is every interface"
        assert re.search(r"=127\.0\.0\.1(:\d+)?$", listening[0])
    assert not given.get("privileged")


def test_every_volume_exists_and_is_used() -> None:
    used = set()
    for service in SERVICES:
        for source, _ in mounts(service):
            if source.startswith("./"):
                assert (MONITORING / source).exists(), source
            else:
                used.add(source)
    assert used == set(COMPOSE["volumes"])


def test_what_the_containers_are_told_is_there() -> None:
    """Prometheus finds its configuration and the rules beside it; Grafana its datasource at Prometheus' address, the
    folder of the dashboards, and the one it opens with."""
    prometheus = SERVICES["prometheus"]["command"]
    options = dict(word.removeprefix("--").split("=", 1) for word in prometheus)
    config = on_host("prometheus", options["config.file"])
    for rules in yaml.safe_load(config.read_text())["rule_files"]:
        assert on_host("prometheus", str(PurePosixPath(options["config.file"]).with_name(rules))).is_file()
    provisioning = on_host("grafana", "/etc/grafana/provisioning")
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == f"http://{options['web.listen-address']}"
    assert (source["type"], source["access"]) == ("prometheus", "proxy")
    (provider,) = yaml.safe_load((provisioning / "dashboards/laddertron.yml").read_text())["providers"]
    assert sorted(on_host("grafana", provider["options"]["path"]).glob("*.json")) == BOARDS
    assert on_host("grafana", SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]).is_file()


def boards() -> list[tuple[str, dict[str, Any]]]:
    return [(path.stem, json.loads(path.read_text())) for path in BOARDS]


def test_boards_have_names_of_their_own_and_links_that_lead_somewhere() -> None:
    found = boards()
    uids = [board["uid"] for _, board in found]
    assert len(set(uids)) == len({board["title"] for _, board in found}) == len(uids) == 5
    for name, board in found:
        targets = {link["url"] for link in board["links"]}
        assert targets == {f"/d/{uid}" for uid in uids if uid != board["uid"]}, name


@pytest.mark.parametrize(("name", "board"), boards(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_board_would_show_what_it_says(name: str, board: dict[str, Any]) -> None:
    """Panels and targets have ids of their own, a kind and unit that Grafana knows, and the board's datasource; a
    variable is defined before it is used; nothing lies on anything else."""
    variables: set[str] = set()
    for variable in board["templating"]["list"]:
        assert set(re.findall(r"\$\{?(\w+)", json.dumps(variable).replace("$__all", ""))) <= variables
        variables.add(variable["name"])
    used = set(re.findall(r"\$\{?(\w+)", json.dumps([board["panels"], board["annotations"]])))
    assert used <= variables | GRAFANA_OWN
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels if panel["type"] == "row"}) > 0
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["type"] in KINDS
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        if panel["type"] == "row":
            continue
        assert len(panel["description"]) > 8
        assert panel["description"].endswith(".")
        if panel["type"] == "text":
            assert link_faults(re.findall(r"\]\((\S+?)\)", panel["options"]["content"])) == []
            continue
        assert panel["links"]
        assert link_faults([link["url"] for link in panel["links"]]) == [], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        letters = [target["refId"] for target in panel["targets"]]
        assert letters
        assert len(set(letters)) == len(letters)
        for target in panel["targets"]:
            assert "datasource" not in target, "else it is not the panel's"
            assert legend_faults(target) == [], panel["title"]
            assert unit_fault(panel, target["expr"]) is None, (panel["title"], target["expr"])


def link_faults(urls: list[str]) -> list[str]:
    """Links that lead to no section of the runbook and to no dashboard."""
    runbook = (MONITORING.parents[1] / "docs/runbook.md").read_text()
    sections = {f"docs/runbook.md#{name.lower()}" for name in re.findall(r"^## (\w+)$", runbook, re.MULTILINE)}
    own = {f"/d/{board['uid']}" for _, board in boards()}
    return [url for url in urls if url not in sections and url.partition("?")[0] not in own]


def test_the_overview_asks_in_the_operators_order() -> None:
    """Is it up, is it quick, what is exposed, what runs, what is alerting: and every alert's section is linked."""
    (overview,) = (board for name, board in boards() if name == "overview")
    rows = [panel for panel in overview["panels"] if panel["type"] == "row"]
    assert [row["title"].split()[-1] for row in rows] == ["up?", "quick?", "link?", "runs?", "alerting?"]
    assert [row["gridPos"]["y"] for row in rows] == sorted(row["gridPos"]["y"] for row in rows)
    (text,) = (panel["options"]["content"] for panel in overview["panels"] if panel["type"] == "text")
    alerts = re.findall(r"alert: (\w+)", (MONITORING / "alerts.yml").read_text())
    assert re.findall(r"#(\w+)\)", text) == [
        name.lower() for name in sorted(alerts, key=lambda name: text.index(f"#{name.lower()})"))
    ]


def legend_faults(target: dict[str, Any]) -> list[str]:
    """Labels of the legend that the result cannot have: they would be shown as nothing."""
    expression = target["expr"]
    kept = {label.strip() for by in re.findall(r"\bby \(([^)]*)\)", expression) for label in by.split(",")}
    if not kept and not re.match(r"(sum|max|min|avg|count)\(", expression):
        names = re.findall(rf"{PREFIX}([a-z0-9_]+?)(?:_bucket|_sum|_count)?\{{", expression)
        kept = {label for name in names for label in CATALOGUE[name].labels}
    return sorted(set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) - kept)


BY_SUFFIX = {
    "_bytes": "bytes",
    "_ratio": "percentunit",
    "_celsius": "celsius",
    "_watts": "watt",
    "_hertz": "hertz",
    "_seconds_bucket": "s",
}


def unit_fault(panel: dict[str, Any], expression: str) -> str | None:
    """What the unit should be, by the name of the one series that is shown, if it is another."""
    names = set(re.findall(rf"{PREFIX}[a-z0-9_]+", expression))
    if len(names) != 1 or "/" in expression:
        return None
    (name,), unit = names, panel["fieldConfig"]["defaults"]["unit"]
    if name.endswith("_bytes_total") and "rate(" in expression:
        return None if unit == "Bps" else "Bps"
    wanted = next((given for suffix, given in BY_SUFFIX.items() if name.endswith(suffix)), None)
    return None if wanted in (None, unit) else wanted


def test_the_rules_here_would_notice() -> None:
    """The two rules above, on what they are for."""
    assert legend_faults({"expr": f"sum by (link) (rate({PREFIX}collectives_total{{}}[1m]))", "legendFormat": "{{op}}"})
    assert legend_faults({"expr": f"max({PREFIX}kv_cache_usage_ratio{{}})", "legendFormat": "{{replica}}"})
    panel = {"fieldConfig": {"defaults": {"unit": "short"}}}
    assert unit_fault(panel, f"rate({PREFIX}collective_bytes_total{{}}[1m])") == "Bps"
    assert link_faults(["docs/runbook.md#nothing", "/d/nowhere?x=1", "/d/laddertron-fabric?x=1"]) == [
        "docs/runbook.md#nothing",
        "/d/nowhere?x=1",
    ]
    assert unit_fault(panel, f"max({PREFIX}kv_cache_usage_ratio{{}})") == "percentunit"
