"""Check of the nodes before the ranks start: hardware errors are found in seconds, not after the job has hung."""
