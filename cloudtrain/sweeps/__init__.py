"""Sweeps: many runs of one job with other hyperparameters, as one object under one budget."""
