"""Write characters as numbers: train.bin, val.bin and their meta.pkl."""

import os
import pickle
import random

import numpy as np

draw = random.Random(7)
words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(40)]
data = " ".join(draw.choice(words) for _ in range(8000))
chars = sorted(set(data))
stoi = {ch: i for i, ch in enumerate(chars)}
ids = np.array([stoi[c] for c in data], dtype=np.uint16)
folder = os.path.dirname(__file__)
ids[: int(len(ids) * 0.9)].tofile(os.path.join(folder, "train.bin"))
ids[int(len(ids) * 0.9) :].tofile(os.path.join(folder, "val.bin"))
with open(os.path.join(folder, "meta.pkl"), "wb") as f:
    pickle.dump({"vocab_size": len(chars), "itos": dict(enumerate(chars)), "stoi": stoi}, f)
print(f"{len(ids):,} characters, vocabulary of {len(chars)}")
