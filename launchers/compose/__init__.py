"""Command lines: which launcher, which hosts, which network, which rank where."""
