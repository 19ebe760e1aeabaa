"""Commands of tools/bench: one file each."""
