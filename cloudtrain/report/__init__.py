"""Runs as figures, as an HTML file, in a notebook, and compared."""
