"""In the shape of transformers' task page on question answering: where in a text the answer begins and ends."""

from datasets import load_dataset
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, DefaultDataCollator, Trainer, TrainingArguments

tokenizer = AutoTokenizer.from_pretrained("made/bert")


def prepare(rows):
    inputs = tokenizer(rows["question"], rows["context"], max_length=24, truncation="only_second", padding="max_length")
    inputs["start_positions"], inputs["end_positions"] = rows["start"], rows["end"]
    return inputs


trainer = Trainer(
    model=AutoModelForQuestionAnswering.from_pretrained("made/bert"),
    args=TrainingArguments("out", learning_rate=1e-3, per_device_train_batch_size=2, max_steps=8, save_steps=2),
    train_dataset=load_dataset("made/questions", split="train").map(prepare, batched=True),
    data_collator=DefaultDataCollator(),
)
trainer.train()
