"""Checkpoints: their files, the state in them, when they are written."""
