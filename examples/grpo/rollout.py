"""Sample completions over HTTP: POST /completions with prompts as token ids, PUT /weights with new weights.

The weights travel over HTTP, so the roles' nodes need no common disk. `transformers serve` and vLLM's server have other
routes for the same; they take the place of this file where the policy is a real one.
"""

import argparse
import json
from http.server import BaseHTTPRequestHandler, HTTPServer

import safetensors.torch
import torch
from policy import build

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
arguments = parser.parse_args()
policy = build()


class Rollout(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"ready": True})

    def do_PUT(self):
        policy.load_state_dict(safetensors.torch.load(self.body()), strict=False)  # the head is tied to the embedding
        self.answer({})

    def do_POST(self):
        request = json.loads(self.body())
        torch.manual_seed(request["seed"])
        prompts = torch.tensor(request["prompts"])
        made = policy.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, pad_token_id=0,
            max_new_tokens=request["max_tokens"], num_return_sequences=request["n"],
        )  # fmt: skip
        self.answer({"completions": made[:, prompts.shape[1] :].tolist()})

    def body(self):
        return self.rfile.read(int(self.headers["Content-Length"]))

    def answer(self, body):
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


HTTPServer(("", arguments.port), Rollout).serve_forever()
