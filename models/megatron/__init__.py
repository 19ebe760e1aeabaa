"""Models with a laddertron wiring as Megatron-core's GPTModel, for training: Megatron-LM takes a spec of `specs`."""
