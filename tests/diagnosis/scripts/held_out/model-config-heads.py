from transformers import GPT2Config, GPT2LMHeadModel

GPT2LMHeadModel(GPT2Config(n_embd=50, n_head=4, n_layer=1, vocab_size=10))
