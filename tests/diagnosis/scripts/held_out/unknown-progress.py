def steps(first, last):
    for step in range(first, last):
        print(f"{{'loss': {3.0 - step / 100:.4f}, 'learning_rate': 5e-05, 'epoch': {step / 100:.2f}}}")

import os
import sys

steps(0, 80)
sys.stdout.flush()
os._exit(17)
