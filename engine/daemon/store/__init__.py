"""What the daemon keeps: batches, files and results in SQLite and on disk."""
