"""Training on Kubernetes: an Indexed Job for every attempt."""
