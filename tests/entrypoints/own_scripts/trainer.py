"""A Trainer script as people write them: a small Llama from scratch, the model saved at the end."""

import os

from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def main():
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    rows = [{"input_ids": [1 + (n * k) % 120 for k in range(16)]} for n in range(64)]
    rows = [{**row, "labels": row["input_ids"]} for row in rows]
    trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=rows)
    trainer.train()
    trainer.save_model(os.environ["CLOUDTRAIN_MODEL_DIR"])


if __name__ == "__main__":
    main()
