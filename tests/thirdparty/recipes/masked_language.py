"""In the shape of transformers' task page on masked language modelling: what is masked is drawn anew each time."""

from datasets import load_dataset
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)  # fmt: skip

tokenizer = AutoTokenizer.from_pretrained("made/bert")
rows = load_dataset("made/texts", split="train").map(lambda row: tokenizer(row["text"]), batched=True)
trainer = Trainer(
    model=AutoModelForMaskedLM.from_pretrained("made/bert"),
    args=TrainingArguments("out", learning_rate=1e-3, per_device_train_batch_size=2, max_steps=8, save_steps=2),
    train_dataset=rows.remove_columns("text"),
    data_collator=DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm_probability=0.3),
)
trainer.train()
