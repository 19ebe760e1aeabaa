"""Commands of tools/train: one file each."""
