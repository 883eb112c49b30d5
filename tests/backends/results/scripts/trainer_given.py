"""The Trainer as transformers' examples use it: `--resume_from_checkpoint` names the checkpoint."""

from data import load_data, load_model
from transformers import HfArgumentParser, Trainer, TrainingArguments

(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
print("resumes at", (args.resume_from_checkpoint or "0").rpartition("-")[2], flush=True)
trainer = Trainer(model=load_model(), args=args, train_dataset=load_data())
trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
trainer.save_model()
