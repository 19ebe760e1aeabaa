"""The daemon's HTTP interface: routes, keys, limits and errors."""
