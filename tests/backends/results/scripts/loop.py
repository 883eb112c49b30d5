"""A plain loop that saves its state beside itself."""

import argparse
import os
import pickle

import pace

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir")
out = parser.parse_args().output_dir
os.makedirs(out, exist_ok=True)
state = {"step": 0}
if os.path.exists(f"{out}/state.pkl"):
    with open(f"{out}/state.pkl", "rb") as file:
        state = pickle.load(file)
print("resumes at", state["step"], flush=True)
for step in range(state["step"] + 1, pace.LAST + 1):
    pace.at(step)
    if step % pace.EVERY == 0:
        with open(f"{out}/state.pkl", "wb") as file:
            pickle.dump({"step": step}, file)
