"""Measured steps: benchmarks, spans and timelines."""
