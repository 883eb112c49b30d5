"""In the shape of TRL's page of GRPOTrainer: what was generated is trained on twice, in two parts each time."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def reward(completions, **kwargs):
    return [float(len(set(completion.split()))) for completion in completions]


config = GRPOConfig(
    "out", bf16=False, max_steps=8, save_steps=2, per_device_train_batch_size=4, num_generations=4, max_completion_length=6,
    num_iterations=2, steps_per_generation=2, learning_rate=1e-2,
)  # fmt: skip
dataset = load_dataset("made/prompts", split="train")
trainer = GRPOTrainer(model="made/llama", reward_funcs=reward, args=config, train_dataset=dataset)
trainer.train()
