"""The shared trainer (train.py): models, data, strategies, checkpoints. Part of every bundle."""
