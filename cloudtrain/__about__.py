"""The version of this package: a module of its own, which every other one may import."""

__version__ = "0.1.0"
