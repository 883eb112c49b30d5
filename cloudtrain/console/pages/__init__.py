"""The console's pages, and the parts that only one page has."""
