"""In the shape of nanoGPT: `--init_from=resume` reads ckpt.pt of `--out_dir`, else it starts from scratch."""

import os
import pickle
import sys

import pace

out_dir, init_from = "out", "scratch"
for word in sys.argv[1:]:
    name, value = word.removeprefix("--").split("=")
    globals()[name] = value
os.makedirs(out_dir, exist_ok=True)
iter_num = 0
if init_from == "resume":
    with open(os.path.join(out_dir, "ckpt.pt"), "rb") as file:
        iter_num = pickle.load(file)["iter_num"]
print("resumes at", iter_num, flush=True)
while iter_num < pace.LAST:
    iter_num += 1
    pace.at(iter_num)
    if iter_num % pace.EVERY == 0:
        with open(os.path.join(out_dir, "ckpt.pt"), "wb") as file:
            pickle.dump({"iter_num": iter_num}, file)
