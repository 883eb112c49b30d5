"""Checkpoints: files, training state, epochs, asynchronous saving."""
