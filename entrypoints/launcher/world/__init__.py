"""The nodes of an attempt: the platform's cluster, the control channel, the outcome."""
