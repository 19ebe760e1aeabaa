"""The dashboards, in the order of their links. Every expression is run against a live scrape by the tests of
monitoring."""

from __future__ import annotations

from .dashboards_machine import FABRIC, RELIABILITY
from .dashboards_serving import ENGINE, LATENCY, OVERVIEW

BOARDS = (OVERVIEW, LATENCY, FABRIC, ENGINE, RELIABILITY)
