"""Functions as jobs: what of a function travels, its submission, and many calls of it as one group."""
