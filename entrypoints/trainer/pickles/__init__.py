"""Pickles whose large tensors and arrays are in a file beside them. Python 3.9; torch and numpy where they are used."""
