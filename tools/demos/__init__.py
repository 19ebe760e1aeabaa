"""Demonstrations: a race of wirings, a night of failures, monitoring under load."""
