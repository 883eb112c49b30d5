"""A model in memory, trained over nodes through a submitted job."""
