"""One batch without a daemon."""
