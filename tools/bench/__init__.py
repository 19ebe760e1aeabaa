"""Measured steps: benchmarks and spans."""
