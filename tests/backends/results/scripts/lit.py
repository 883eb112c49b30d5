"""Lightning: `ckpt_path="last"` finds last.ckpt."""

import argparse
import logging

import lightning
import pace
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="out")
args = parser.parse_args()


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def on_train_start(self):
        print("resumes at", self.global_step, flush=True)

    def training_step(self, batch, _):
        pace.at(self.global_step + 1)
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
saver = ModelCheckpoint(dirpath=args.output_dir, every_n_train_steps=pace.EVERY, save_top_k=-1, save_last=True)
trainer = lightning.Trainer(accelerator="cpu", max_steps=pace.LAST, callbacks=[saver], logger=False,
                            enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
trainer.fit(Model(), DataLoader(TensorDataset(torch.ones(pace.LAST, 4))), ckpt_path="last")
