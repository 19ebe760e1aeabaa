"""The daemon's store: batches, files and results in SQLite and on disk."""
