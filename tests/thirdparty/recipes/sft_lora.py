"""In the shape of TRL's page on PEFT: adapters of a model that is given by its name."""

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(
    model="made/llama",
    args=SFTConfig("out", bf16=False, max_steps=8, save_steps=2, per_device_train_batch_size=2, learning_rate=1e-2),
    train_dataset=load_dataset("made/texts", split="train"),
    peft_config=LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model("out/adapter")
