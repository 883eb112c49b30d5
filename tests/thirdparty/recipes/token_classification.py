"""In the shape of transformers' task page on token classification: a label for each word."""

from datasets import load_dataset
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    Trainer,
    TrainingArguments,
)  # fmt: skip

tokenizer = AutoTokenizer.from_pretrained("made/bert")


def tokenize_and_align(rows):
    tokenized = tokenizer(rows["tokens"], truncation=True, is_split_into_words=True)
    tokenized["labels"] = [
        [-100 if word is None else tags[word] for word in tokenized.word_ids(batch_index=number)]
        for number, tags in enumerate(rows["tags"])
    ]
    return tokenized


trainer = Trainer(
    model=AutoModelForTokenClassification.from_pretrained("made/bert", num_labels=3),
    args=TrainingArguments("out", learning_rate=1e-3, per_device_train_batch_size=2, max_steps=8, save_steps=2),
    train_dataset=load_dataset("made/tagged", split="train").map(tokenize_and_align, batched=True),
    data_collator=DataCollatorForTokenClassification(tokenizer=tokenizer),
)
trainer.train()
