"""laddertron: cross-node LLM inference with Ladder Residual layers. Importing it imports nothing else."""

__version__ = "0.1.0"
