import numpy as np

print("building the attention bias")
bias = np.ones((1_000_000, 1_000_000, 64), dtype=np.float32)
print(bias.shape)
