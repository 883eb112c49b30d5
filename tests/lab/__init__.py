"""Machines for tests: hosts in network namespaces, each with its own address, hostname, PIDs, files and sshd."""
