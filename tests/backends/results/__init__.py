"""What scripts make comes home from every target, and their next attempt finds it (docs/scripts.md has the table)."""
