"""A source directory becomes a bundle: listed, searched for secrets, archived."""
