"""Training on machines of one's own, over SSH."""
