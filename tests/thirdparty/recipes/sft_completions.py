"""In the shape of TRL's page of SFTTrainer: prompts and completions, the loss of the completions alone."""

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(
    model="made/llama",
    args=SFTConfig(
        "out", bf16=False, max_steps=8, save_steps=2, per_device_train_batch_size=2, completion_only_loss=True
    ),
    train_dataset=load_dataset("made/answers", split="train"),
)
trainer.train()
