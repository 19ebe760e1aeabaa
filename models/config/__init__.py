"""A checkpoint's configuration: shapes, wiring, quantisation, known models. No torch."""
