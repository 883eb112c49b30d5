"""Train an autoencoder with Lightning, in the shape of its own examples; --ckpt_path last goes on where it stood."""

import argparse
import os

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitAutoEncoder(L.LightningModule):
    def __init__(self, hidden: int = 32, learning_rate: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 3))
        self.decoder = nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 64))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


class Pictures(L.LightningDataModule):
    def __init__(self, batch_size: int = 16):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str):
        draw = torch.Generator().manual_seed(3)
        self.train = TensorDataset(torch.rand(4096, 4, generator=draw) @ torch.rand(4, 64, generator=draw))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=False)


class PrintLoss(Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        loss = trainer.callback_metrics["train_loss"].item()
        print(f"epoch={trainer.current_epoch} step={trainer.global_step} train_loss={loss:.6f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_epochs", type=int, default=10)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--num_nodes", type=int, default=1)
    parser.add_argument("--default_root_dir", default=os.getcwd())
    parser.add_argument("--ckpt_path", default=None)
    args = parser.parse_args()
    L.seed_everything(1)
    keeper = ModelCheckpoint(
        dirpath=os.path.join(args.default_root_dir, "checkpoints"), save_last=True, filename="{epoch}"
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        num_nodes=args.num_nodes,
        strategy="ddp" if args.devices * args.num_nodes > 1 else "auto",
        max_epochs=args.max_epochs,
        default_root_dir=args.default_root_dir,
        callbacks=[keeper, PrintLoss()],
        enable_progress_bar=False,
        logger=False,
    )
    model = LitAutoEncoder()
    trainer.fit(model, datamodule=Pictures(), ckpt_path=args.ckpt_path)
    print(f"rank {trainer.global_rank} of {trainer.world_size} done", flush=True)
    if trainer.is_global_zero:
        print(f"parameter norm {sum(p.double().pow(2).sum() for p in model.parameters()).sqrt():.8f}")


if __name__ == "__main__":
    main()
