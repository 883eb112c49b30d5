"""The job file: what it may say, how it is read, and where every value came from."""
