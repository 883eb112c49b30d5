"""In the shape of transformers' task page on translation: a sequence to a sequence."""

from datasets import load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)  # fmt: skip

tokenizer = AutoTokenizer.from_pretrained("made/t5")


def prepare(rows):
    return tokenizer(rows["source"], text_target=rows["target"], max_length=32, truncation=True)


model = AutoModelForSeq2SeqLM.from_pretrained("made/t5")
trainer = Seq2SeqTrainer(
    model=model,
    args=Seq2SeqTrainingArguments(
        "out", learning_rate=1e-2, per_device_train_batch_size=2, max_steps=8, save_steps=2, predict_with_generate=True
    ),
    train_dataset=load_dataset("made/pairs", split="train").map(prepare, batched=True),
    processing_class=tokenizer,
    data_collator=DataCollatorForSeq2Seq(tokenizer=tokenizer, model=model),
)
trainer.train()
