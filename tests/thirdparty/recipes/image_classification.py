"""In the shape of transformers' task page on image classification: pixels by a transform, all columns kept."""

import numpy
import torch
from datasets import Dataset
from transformers import AutoModelForImageClassification, DefaultDataCollator, Trainer, TrainingArguments

made = numpy.load("made/images.npz")
rows = Dataset.from_dict({"image": list(range(len(made["labels"]))), "label": made["labels"].tolist()})


def transforms(batch):
    pixels = [torch.from_numpy(made["pixels"][number]) for number in batch["image"]]
    return {
        "pixel_values": [each.flip(-1) if torch.rand(()) < 0.5 else each for each in pixels],
        "label": batch["label"],
    }


trainer = Trainer(
    model=AutoModelForImageClassification.from_pretrained("made/vit"),
    args=TrainingArguments(
        "out", remove_unused_columns=False, learning_rate=1e-3, per_device_train_batch_size=2, warmup_steps=2, max_steps=8,
        save_strategy="steps", save_steps=2,
    ),
    train_dataset=rows.with_transform(transforms),
    data_collator=DefaultDataCollator(),
)  # fmt: skip
trainer.train()
