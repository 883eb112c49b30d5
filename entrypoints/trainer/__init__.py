"""The parts of the shared trainer (train.py). They travel in every bundle."""
