"""GRPO in a plain loop: a completion is as good as it is better than the others of its prompt.

The task: repeat the last token of the prompt. The reward of a completion is the share of its tokens that do.
"""

import argparse
import json
import time
import urllib.error
import urllib.request

import safetensors.torch
import torch
from policy import TOKENS, build

parser = argparse.ArgumentParser()
parser.add_argument("--server", required=True, help="address of the rollout role")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--prompts", type=int, default=16, help="of each step")
parser.add_argument("--group", type=int, default=8, help="completions of each prompt")
parser.add_argument("--length", type=int, default=8, help="tokens of a completion")
parser.add_argument("--clip", type=float, default=0.2)
arguments = parser.parse_args()


def call(method, path, body):
    request = urllib.request.Request(f"{arguments.server}{path}", body, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def sample(policy, prompts, seed):
    """Return completions of the policy as it is now; a server that was restarted has other weights until then."""
    weights = {name: value for name, value in policy.state_dict().items() if name != "lm_head.weight"}
    asked = {"prompts": prompts.tolist(), "n": arguments.group, "max_tokens": arguments.length, "seed": seed}
    until = time.monotonic() + 60
    while True:
        try:
            call("PUT", "/weights", safetensors.torch.save(weights))
            return torch.tensor(call("POST", "/completions", json.dumps(asked).encode())["completions"])
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def log_probabilities(policy, tokens):
    """Return the log-probability of each token of the completions."""
    logits = policy(tokens).logits[:, -arguments.length - 1 : -1]
    return logits.log_softmax(-1).gather(-1, tokens[:, -arguments.length :, None]).squeeze(-1)


policy = build()
optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
means = []
for step in range(1, arguments.steps + 1):
    prompts = torch.randint(TOKENS, (arguments.prompts, 4))
    completions = sample(policy, prompts, step)
    prompts = prompts.repeat_interleave(arguments.group, 0)
    rewards = (completions == prompts[:, -1:]).float().mean(-1)
    groups = rewards.view(arguments.prompts, arguments.group)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    tokens = torch.cat((prompts, completions), 1)
    with torch.no_grad():
        before = log_probabilities(policy, tokens)
    for _ in range(2):  # updates for each batch of completions, held near the policy that made them
        ratio = (log_probabilities(policy, tokens) - before).exp()
        clipped = ratio.clamp(1 - arguments.clip, 1 + arguments.clip)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    means.append(rewards.mean().item())
    print(f"step={step} reward={means[-1]:.3f} loss={loss.item():.4f}", flush=True)
first, last = (sum(part) / len(part) for part in (means[:10], means[-10:]))
print(f"mean reward of 10 steps: {first:.2f} at first, {last:.2f} at last")
