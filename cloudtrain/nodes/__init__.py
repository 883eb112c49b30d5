"""A node's folder and its supervisor, on this machine or over SSH."""
