"""The batch-inference daemon: HTTP, store, dispatch. Its process imports neither torch nor MPI."""
