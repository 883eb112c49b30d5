"""In the shape of Accelerate's examples/by_feature/checkpointing.py: a folder step_N for each checkpoint."""

import argparse
import os

import pace
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default=".")
parser.add_argument("--resume_from_checkpoint")
args = parser.parse_args()
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(TensorDataset(torch.ones(pace.LAST, 4)), batch_size=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
overall_step = 0
if args.resume_from_checkpoint:
    accelerator.load_state(args.resume_from_checkpoint)
    overall_step = int(os.path.basename(args.resume_from_checkpoint).replace("step_", ""))
print("resumes at", overall_step, flush=True)
for (batch,) in accelerator.skip_first_batches(loader, overall_step) if overall_step else loader:
    pace.at(overall_step + 1)
    accelerator.backward(model(batch).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
    overall_step += 1
    if overall_step % pace.EVERY == 0:
        accelerator.save_state(os.path.join(args.output_dir, f"step_{overall_step}"))
