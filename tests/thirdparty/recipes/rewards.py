"""A reward by import path, as `trl grpo --reward_funcs` takes it."""


def variety(completions, **kwargs):
    return [float(len(set(completion.split()))) for completion in completions]
