"""Commands of tools/plan: one file each."""
