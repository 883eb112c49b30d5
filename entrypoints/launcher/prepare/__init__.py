"""What a node needs before its ranks start: secrets, inputs, requirements, GPUs."""
