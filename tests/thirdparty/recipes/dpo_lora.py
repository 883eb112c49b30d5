"""In the shape of TRL's page of DPOTrainer, with adapters: the model without them is the reference."""

from datasets import load_dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

trainer = DPOTrainer(
    model="made/llama",
    args=DPOConfig("out", bf16=False, max_steps=8, save_steps=2, per_device_train_batch_size=2, learning_rate=1e-2),
    train_dataset=load_dataset("made/preferences", split="train"),
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
