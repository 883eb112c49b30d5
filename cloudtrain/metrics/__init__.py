"""Metrics in ordinary log lines."""
