"""Tune a small Llama with LoRA adapters, in the shape of PEFT's causal language modelling example."""

import os
from dataclasses import dataclass, field

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


@dataclass
class LoraArguments:
    lora_r: int = field(default=8, metadata={"help": "rank of the adapters"})
    lora_alpha: int = field(default=16)
    lora_target_modules: list[str] = field(default_factory=lambda: ["q_proj", "v_proj"])


class Counting(Dataset):
    """Sequences that count up from a drawn number."""

    def __len__(self):
        return 2000

    def __getitem__(self, index):
        ids = (torch.arange(24) + index * 7) % 64
        return {"input_ids": ids, "labels": ids}


def main():
    lora, args = HfArgumentParser((LoraArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    base = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    )
    config = LoraConfig(
        r=lora.lora_r, lora_alpha=lora.lora_alpha, target_modules=lora.lora_target_modules, task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, config)
    model.print_trainable_parameters()
    trainer = Trainer(model=model, args=args, train_dataset=Counting())
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    model.save_pretrained(os.path.join(args.output_dir, "adapter"))
    print(f"rank {args.process_index} of {args.world_size} done", flush=True)
    if trainer.is_world_process_zero():
        adapters = (p for name, p in model.named_parameters() if "lora_" in name)
        print(f"parameter norm {sum(p.detach().double().pow(2).sum() for p in adapters).sqrt():.8f}")


if __name__ == "__main__":
    main()
