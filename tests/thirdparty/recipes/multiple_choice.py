"""In the shape of transformers' task page on multiple choice: which of four ends fits."""

from datasets import load_dataset
from transformers import AutoModelForMultipleChoice, AutoTokenizer, DefaultDataCollator, Trainer, TrainingArguments

tokenizer = AutoTokenizer.from_pretrained("made/bert")


def prepare(row):
    tokenized = tokenizer([row["start"]] * 4, row["ends"], padding="max_length", max_length=16, truncation=True)
    return {name: tokenized[name] for name in ("input_ids", "attention_mask", "token_type_ids")}


trainer = Trainer(
    model=AutoModelForMultipleChoice.from_pretrained("made/bert"),
    args=TrainingArguments("out", learning_rate=1e-3, per_device_train_batch_size=2, max_steps=8, save_steps=2),
    train_dataset=load_dataset("made/choices", split="train").map(prepare),
    data_collator=DefaultDataCollator(),
)
trainer.train()
