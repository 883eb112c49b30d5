"""In the shape of transformers' task page on causal language modelling: texts joined and cut into blocks."""

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)  # fmt: skip

BLOCK = 8
tokenizer = AutoTokenizer.from_pretrained("made/llama")


def group(rows):
    joined = sum(rows["input_ids"], [])
    blocks = [joined[at : at + BLOCK] for at in range(0, len(joined) // BLOCK * BLOCK, BLOCK)]
    return {"input_ids": blocks, "labels": blocks}


rows = load_dataset("made/texts", split="train")
rows = rows.map(lambda row: tokenizer(row["text"]), batched=True, remove_columns=rows.column_names)
trainer = Trainer(
    model=AutoModelForCausalLM.from_pretrained("made/llama"),
    args=TrainingArguments(
        "out",
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=8,
        save_steps=2,
    ),
    train_dataset=rows.map(group, batched=True, remove_columns=rows.column_names),
    data_collator=DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=False),
)
trainer.train()
