"""Classify sequences with the Trainer and nothing around it; a second start begins anew."""

import argparse

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import DistilBertConfig, DistilBertForSequenceClassification, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", default="results")
options = parser.parse_args()


class Reviews(Dataset):
    def __init__(self, size, seed):
        draw = torch.Generator().manual_seed(seed)
        self.encodings = torch.randint(5, 100, (size, 12), generator=draw)
        self.labels = (self.encodings < 50).sum(1).gt(6).long()

    def __getitem__(self, idx):
        return {"input_ids": self.encodings[idx], "labels": self.labels[idx]}

    def __len__(self):
        return len(self.labels)


def compute_metrics(prediction):
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


training_args = TrainingArguments(
    output_dir=options.output_dir,
    num_train_epochs=2,
    per_device_train_batch_size=16,
    learning_rate=3e-3,
    warmup_steps=10,
    logging_steps=5,
    eval_strategy="epoch",
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
set_seed(training_args.seed)
model = DistilBertForSequenceClassification(
    DistilBertConfig(vocab_size=100, dim=32, hidden_dim=64, n_layers=2, n_heads=2, max_position_embeddings=32)
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=Reviews(1024, 1),
    eval_dataset=Reviews(128, 2),
    compute_metrics=compute_metrics,
)
trainer.train()
trainer.save_model()
print(f"rank {training_args.process_index} of {training_args.world_size} done", flush=True)
if trainer.is_world_process_zero():
    print(f"parameter norm {sum(p.double().pow(2).sum() for p in model.parameters()).sqrt():.8f}")
