"""A run that was submitted elsewhere, read from its output."""
