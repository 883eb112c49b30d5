"""A plain loop with torch.save, which keeps each of its checkpoints."""

import argparse
import glob
import os

import pace
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="out")
out = parser.parse_args().output_dir
os.makedirs(out, exist_ok=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
done = 0
if saved := sorted(glob.glob(f"{out}/step_*.pt")):
    state = torch.load(saved[-1])
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done = state["step"]
print("resumes at", done, flush=True)
for step in range(done + 1, pace.LAST + 1):
    pace.at(step)
    optimizer.zero_grad()
    model(torch.ones(2, 4)).pow(2).mean().backward()
    optimizer.step()
    if step % pace.EVERY == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, f"{out}/step_{step}.pt")
torch.save(model.state_dict(), f"{out}/model.pt")
