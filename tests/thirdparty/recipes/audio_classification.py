"""In the shape of transformers' task page on audio classification."""

import numpy
from datasets import Dataset
from transformers import AutoFeatureExtractor, AutoModelForAudioClassification, Trainer, TrainingArguments

made = numpy.load("made/sounds.npz")
extractor = AutoFeatureExtractor.from_pretrained("made/wav2vec2")
rows = Dataset.from_dict({"audio": list(made["waves"]), "label": made["labels"].tolist()})
rows = rows.map(
    lambda batch: extractor(batch["audio"], sampling_rate=16000, max_length=400, truncation=True),
    remove_columns="audio", batched=True,
)  # fmt: skip
trainer = Trainer(
    model=AutoModelForAudioClassification.from_pretrained("made/wav2vec2"),
    args=TrainingArguments("out", learning_rate=1e-3, per_device_train_batch_size=2, max_steps=8, save_steps=2),
    train_dataset=rows,
    processing_class=extractor,
)
trainer.train()
