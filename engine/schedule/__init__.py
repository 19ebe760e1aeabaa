"""Scheduling: scheduler, step planner, waiting queue, sequences, KV blocks and prefix hashes."""
