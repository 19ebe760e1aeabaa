"""Commands that make model folders, convert them, and say how good they are."""
