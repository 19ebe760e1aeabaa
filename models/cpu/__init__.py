"""A layer's operators and attention on a CPU, in C behind ctypes."""
