"""Diagnose why a run failed, from its end and the last lines of its log."""
