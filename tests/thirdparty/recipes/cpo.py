"""In the shape of TRL's page of CPOTrainer."""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.cpo import CPOConfig, CPOTrainer

trainer = CPOTrainer(
    model=AutoModelForCausalLM.from_pretrained("made/llama"),
    args=CPOConfig("out", bf16=False, max_steps=8, save_steps=2, per_device_train_batch_size=2),
    processing_class=AutoTokenizer.from_pretrained("made/llama"),
    train_dataset=load_dataset("made/preferences", split="train"),
)
trainer.train()
