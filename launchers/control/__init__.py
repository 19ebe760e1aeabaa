"""The control channel between the daemon and its ranks: frames, messages and both ends."""
