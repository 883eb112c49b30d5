"""Stores and queries the history of all runs in SQLite."""
