def steps(first, last):
    for step in range(first, last):
        print(f"{{'loss': {3.0 - step / 100:.4f}, 'learning_rate': 5e-05, 'epoch': {step / 100:.2f}}}")

import sys

print("WARNING: if you run out of memory (CUDA out of memory), lower --batch_size", file=sys.stderr)
print("memory check: 3.1 GiB of 16.0 GiB in use, no out of memory expected")
steps(0, 40)
open("checkpoints/step-400/optimizer.pt", "rb")
