"""What measures on ranks: benchmarks, preflight and profiles."""
