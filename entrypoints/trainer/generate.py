"""Generate a sample text with the trained model."""

from __future__ import annotations

from typing import Any

import torch


def sample(model: Any, tokenizer: Any, prompt: str, tokens: int, seed: int, chat: bool = False) -> str:
    """Return the prompt and what the model writes after it; the global random numbers stay as they are.

    Args:
        chat: whether the prompt is a user's message, which the chat template renders, and the text is the answer to it.
    """
    device = next(model.parameters()).device
    if chat:
        message = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    else:
        encoded = tokenizer(prompt or tokenizer.eos_token or "\n", return_tensors="pt", add_special_tokens=False)
    ids = encoded["input_ids"]
    room = (getattr(model.config, "max_position_embeddings", None) or 1 << 30) - ids.shape[1]
    if room < 1:
        return prompt
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        torch.manual_seed(seed)
        model.eval()
        written = model.generate(
            ids.to(device),
            attention_mask=torch.ones_like(ids, device=device),
            max_new_tokens=min(tokens, room),
            do_sample=True,
            temperature=0.7,
            top_k=40,
            use_cache=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    if chat:
        return f"{prompt}\n{tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)}"
    return str(tokenizer.decode(written[0], skip_special_tokens=True))
