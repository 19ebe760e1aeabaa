"""Doors: command line, mpirun and Slurm command lines, worker entry, supervisor. No decisions about tokens."""
