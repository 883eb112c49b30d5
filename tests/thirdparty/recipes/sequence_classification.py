"""In the shape of transformers' task page on text classification."""

from datasets import load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)  # fmt: skip

tokenizer = AutoTokenizer.from_pretrained("made/bert")
rows = load_dataset("made/labelled", split="train").map(
    lambda row: tokenizer(row["text"], truncation=True), batched=True
)
trainer = Trainer(
    model=AutoModelForSequenceClassification.from_pretrained("made/bert", num_labels=3),
    args=TrainingArguments(
        "out", learning_rate=1e-3, per_device_train_batch_size=2, num_train_epochs=2, weight_decay=0.01, save_steps=2
    ),
    train_dataset=rows,
    processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer=tokenizer),
)
trainer.train()
