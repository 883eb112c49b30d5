"""A tiny language model and its slow texts, for scripts of transformers."""

import pace
import torch
from transformers import GPT2Config, GPT2LMHeadModel


class Texts(torch.utils.data.Dataset):
    """One sample a step; its step is its place."""

    def __len__(self):
        return pace.LAST

    def __getitem__(self, at):
        pace.at(at + 1)
        return {"input_ids": torch.arange(8), "labels": torch.arange(8)}


def load_data():
    return Texts()


def load_model():
    return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1))
