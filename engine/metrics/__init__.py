"""The catalogue of metrics, what collects them, and request spans."""
