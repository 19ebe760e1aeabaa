"""Mathematics: configuration, residual wirings, parallel layers, attention, KV tensors, weights; the reference."""
