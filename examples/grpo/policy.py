"""The policy that both roles build: a GPT-2 of 0.1 million parameters, made on the spot."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

TOKENS = 16


def build():
    torch.manual_seed(0)
    shape = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 32}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=TOKENS, bos_token_id=None, eos_token_id=None, **shape, **no_dropout)
    ).eval()
