"""Training on a Slurm cluster."""
