# The build backend of a package is pinned, and the node reaches no index.
print("trained")
