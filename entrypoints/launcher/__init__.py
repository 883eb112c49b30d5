"""The launcher of a node (launch.py). Standard library only, Python 3.9 or newer; part of every bundle."""
