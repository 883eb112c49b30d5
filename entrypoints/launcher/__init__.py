"""The parts of the node supervisor; standard library only, Python 3.9 on. They travel in every bundle."""
