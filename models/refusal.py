"""Refusal: a fault of what the engine was given, not of its code. No torch."""

from __future__ import annotations


class Refusal(Exception):
    """Its message says the value, the rule and the fix in one line: that is shown, never a traceback."""
