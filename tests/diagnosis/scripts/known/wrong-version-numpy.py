import numpy as np


def normalise(values):
    return np.asarray(values, dtype=np.float) / 255


print(normalise([1, 2]))
