"""The deployment file: read, checked and bound to its schema."""
