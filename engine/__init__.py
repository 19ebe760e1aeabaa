"""Time and bookkeeping: requests, KV blocks, schedule, sampling, the step loop, metrics."""
