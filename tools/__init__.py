"""Tools on top of the engine, imported by none of its layers: plans, benchmarks, training and demos."""
