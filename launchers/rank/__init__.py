"""A rank's life, from its start to its last heartbeat."""
