"""The shipped rules with their minutes turned into seconds, so that a test need not wait as long as an operator would
want to: every duration of the file is divided by one number, nothing else is touched but what SECONDS names."""

from __future__ import annotations

import re
from typing import Any

import yaml

UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
LEAST_WINDOW_S = 5
"""Of a range: a rate needs some scrapes in it, whatever the factor; scrapes come once a second."""
LEAST_FOR_S = 1
SECONDS = {"LaddertronNoSteps": (r"> 30$", "> 3")}
"""Times that stand in an expression as plain numbers: rule -> (what is there, what to put there)."""
_DURATION = re.compile(r"(\d+)(ms|[smhdw])")
_IN_EXPRESSION = re.compile(r"\[(\d+(?:ms|[smhdw]))\]|\boffset (\d+(?:ms|[smhdw]))\b")


def seconds(duration: str) -> float:
    """Of one number and unit, such as 15m. Raises ValueError."""
    found = _DURATION.fullmatch(duration)
    if found is None:
        raise ValueError(f"{duration!r} is no duration of one number and unit, such as 15m")
    return int(found[1]) * UNITS[found[2]]


def divided(duration: str, factor: float, least_s: float) -> str:
    """In whole seconds, rounded up, at least `least_s`."""
    return f"{int(max(least_s, -(-seconds(duration) // factor)))}s"


def scaled_expression(text: str, factor: float) -> str:
    """Ranges and offsets divided."""

    def one(found: re.Match[str]) -> str:
        if found[1]:
            return f"[{divided(found[1], factor, LEAST_WINDOW_S)}]"
        return f"offset {divided(found[2], factor, 1)}"

    return _IN_EXPRESSION.sub(one, text)


def scaled(rules: str, factor: float) -> str:
    """A rule file's text for one that runs `factor` times as fast; groups are evaluated every second."""
    file: dict[str, Any] = yaml.safe_load(rules)
    for group in file["groups"]:
        group["interval"] = "1s"
        for rule in group["rules"]:
            rule["expr"] = scaled_expression(rule["expr"], factor)
            if "for" in rule:
                rule["for"] = divided(rule["for"], factor, LEAST_FOR_S)
            if (change := SECONDS.get(rule.get("alert", ""))) is not None:
                rule["expr"], count = re.subn(change[0], change[1], rule["expr"].strip())
                if count != 1:
                    raise ValueError(f"{rule['alert']}: {change[0]} stands {count} times in {rule['expr']}")
    return yaml.safe_dump(file, sort_keys=False)
