"""Measurements on ranks: benchmarks, preflight and profiles."""
