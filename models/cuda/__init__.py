"""A layer's operators and attention on a GPU: Triton kernels, FlashInfer and fp8 products."""
