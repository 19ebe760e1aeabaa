"""Checkpoints and per-rank files: read, sliced, checked and written."""
