import sys

print("reading configuration")
sys.exit("the configuration has no train split")
