"""Command lines: chooses launcher, hosts, network and places of ranks."""
