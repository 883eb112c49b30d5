"""The script of docs/how/trainer-spot.md with a smaller model: the Trainer finds its own last checkpoint."""

import os

from data import load_data, load_model
from transformers import HfArgumentParser, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
trainer = Trainer(model=load_model(), args=args, train_dataset=load_data())
last = get_last_checkpoint(args.output_dir) if os.path.isdir(args.output_dir) else None
print("resumes at", (last or "0").rpartition("-")[2], flush=True)
trainer.train(resume_from_checkpoint=last)
trainer.save_model()
