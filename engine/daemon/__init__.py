"""The batch-inference daemon: HTTP, store, intake. No torch and no MPI in its process."""
