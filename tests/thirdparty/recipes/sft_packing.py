"""In the shape of TRL's page on packing: several texts in one row."""

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

config = SFTConfig(
    "out",
    bf16=False,
    max_steps=8,
    save_steps=2,
    per_device_train_batch_size=1,
    packing=True,
    packing_strategy="wrapped",
    max_length=16,
)
trainer = SFTTrainer(model="made/llama", args=config, train_dataset=load_dataset("made/texts", split="train"))
trainer.train()
