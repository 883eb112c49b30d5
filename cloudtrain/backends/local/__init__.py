"""Training on this machine."""
