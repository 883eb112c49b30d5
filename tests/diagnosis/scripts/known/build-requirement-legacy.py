# A package with a setup.py alone needs setuptools to be built, too.
print("trained")
