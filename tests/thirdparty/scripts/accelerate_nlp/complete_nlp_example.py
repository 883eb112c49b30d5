"""Classify pairs of sentences with Accelerate, in the shape of its complete_nlp_example.py."""

import argparse
import os

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


class Pairs(Dataset):
    """Two sentences of made-up words; the label says whether they share their first word."""

    def __init__(self, size, seed):
        draw = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(10, 90, (size, 17), generator=draw)
        self.ids[:, 8] = 1
        same = torch.rand(size, generator=draw) < 0.5
        self.ids[same, 9] = self.ids[same, 0]
        self.labels = (self.ids[:, 9] == self.ids[:, 0]).long()

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def training_function(config, args):
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    accelerator.print(accelerator.state)
    if args.checkpointing_steps == "epoch":
        checkpointing_steps = args.checkpointing_steps
    else:
        checkpointing_steps = int(args.checkpointing_steps)
    set_seed(config["seed"])
    train_dataloader = DataLoader(Pairs(512, 1), shuffle=True, batch_size=config["batch_size"])
    eval_dataloader = DataLoader(Pairs(64, 2), shuffle=False, batch_size=32)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    optimizer = AdamW(params=model.parameters(), lr=config["lr"])
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=10,
        num_training_steps=len(train_dataloader) * config["num_epochs"],
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    overall_step, starting_epoch, resume_step = 0, 0, None
    if args.resume_from_checkpoint:
        accelerator.print(f"Resumed from checkpoint: {args.resume_from_checkpoint}")
        accelerator.load_state(args.resume_from_checkpoint)
        training_difference = os.path.basename(args.resume_from_checkpoint.rstrip("/"))
        if "epoch" in training_difference:
            starting_epoch = int(training_difference.replace("epoch_", "")) + 1
        else:
            resume_step = int(training_difference.replace("step_", ""))
            starting_epoch = resume_step // len(train_dataloader)
            overall_step = resume_step
            resume_step -= starting_epoch * len(train_dataloader)

    for epoch in range(starting_epoch, config["num_epochs"]):
        model.train()
        train_dataloader.set_epoch(epoch)
        active_dataloader = train_dataloader
        if args.resume_from_checkpoint and epoch == starting_epoch and resume_step is not None:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
        for batch in active_dataloader:
            outputs = model(**batch)
            accelerator.backward(outputs.loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            accelerator.print(f"step {overall_step}: loss {outputs.loss.item():.6f}")
            if isinstance(checkpointing_steps, int) and overall_step % checkpointing_steps == 0:
                accelerator.save_state(os.path.join(args.project_dir, f"step_{overall_step}"))
        model.eval()
        right = []
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            right.append((predictions == references).float())
        accelerator.print(f"epoch {epoch}: {{'accuracy': {torch.cat(right).mean().item():.4f}}}")
        if checkpointing_steps == "epoch":
            accelerator.save_state(os.path.join(args.project_dir, f"epoch_{epoch}"))

    print(f"rank {accelerator.process_index} of {accelerator.num_processes} done", flush=True)
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        args.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    norm = sum(p.double().pow(2).sum() for p in unwrapped.parameters()).sqrt()
    accelerator.print(f"model saved, parameter norm {norm:.8f}")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--mixed_precision", type=str, default=None, choices=["no", "fp16", "bf16", "fp8"])
    parser.add_argument("--cpu", action="store_true", help="If passed, will train on the CPU.")
    parser.add_argument("--checkpointing_steps", type=str, default=None, help="A number of steps, or 'epoch'.")
    parser.add_argument("--resume_from_checkpoint", type=str, default=None, help="The folder of a checkpoint.")
    parser.add_argument("--output_dir", type=str, default=".", help="Where the model goes.")
    parser.add_argument("--project_dir", type=str, default="logs", help="Where checkpoints go.")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=16)
    args = parser.parse_args()
    training_function({"lr": 2e-3, "num_epochs": args.num_epochs, "seed": 42, "batch_size": args.batch_size}, args)


if __name__ == "__main__":
    main()
