"""Runs as figures, as an HTML file, in a notebook, compared, and as notifications."""
