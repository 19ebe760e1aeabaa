"""Demonstrations: a race of wirings, monitoring under load."""
