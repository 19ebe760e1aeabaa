"""Tools on top of the engine that serve no token: plans, benchmarks, training and demos. No floor imports it."""
