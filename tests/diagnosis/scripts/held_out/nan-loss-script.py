def steps(first, last):
    for step in range(first, last):
        print(f"{{'loss': {3.0 - step / 100:.4f}, 'learning_rate': 5e-05, 'epoch': {step / 100:.2f}}}")

import math

steps(30, 37)
loss = float("inf") - float("inf")
if math.isnan(loss):
    raise FloatingPointError(f"loss is {loss} at step 37")
