import sys

print("INFO  starting run 12")
print("ERROR something went wrong, see above", file=sys.stderr)
sys.exit(3)
