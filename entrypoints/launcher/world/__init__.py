"""The nodes of a job as one cluster: who takes part, and how the attempt ended."""
