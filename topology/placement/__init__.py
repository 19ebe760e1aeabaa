"""Who sits where: identity, layout, grid and mapping of ranks."""
