"""Placement of ranks: identity, layout, grid and mapping of ranks."""
