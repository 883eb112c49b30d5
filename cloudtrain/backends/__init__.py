"""One package for every provider, and what they share."""
