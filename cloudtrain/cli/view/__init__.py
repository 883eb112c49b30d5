"""Shared by the commands: options, tables, and the output of runs, logs and errors."""
