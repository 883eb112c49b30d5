"""What a run can take and cost, said before and while it runs: arithmetic without torch and without network."""
