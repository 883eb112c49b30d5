"""In the shape of TRL's page of ORPOTrainer."""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

trainer = ORPOTrainer(
    model=AutoModelForCausalLM.from_pretrained("made/llama"),
    args=ORPOConfig("out", bf16=False, max_steps=8, save_steps=2, per_device_train_batch_size=2),
    processing_class=AutoTokenizer.from_pretrained("made/llama"),
    train_dataset=load_dataset("made/preferences", split="train"),
)
trainer.train()
