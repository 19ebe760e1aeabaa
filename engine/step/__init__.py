"""One step on a rank: engine, runner, CUDA graphs, KV capacity, loading and time-outs."""
