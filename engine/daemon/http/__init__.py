"""The daemon's HTTP doors: routes, keys, limits and errors."""
