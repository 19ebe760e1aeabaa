"""What is built on the engine and serves no token: plans, benchmarks, training and demos. No floor imports it."""
