"""Preparation of a node before its ranks start: secrets, inputs, requirements, GPUs."""
