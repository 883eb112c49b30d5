"""Score the checkpoints that are posted here on points that the trainer does not see, and keep the best one."""

import argparse
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--folder", type=Path, required=True, help="for the best checkpoint")
arguments = parser.parse_args()
best = float("inf")


class Evaluator(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"ready": True})

    def do_POST(self):
        global best
        checkpoint = self.rfile.read(int(self.headers["Content-Length"]))
        model = json.loads(checkpoint)
        points = [number / 50 - 1 for number in range(101)]
        errors = [(model["a"] * x + model["b"] - (3 * x + 1)) ** 2 for x in points]
        score = sum(errors) / len(errors)
        if score < best:
            best = score
            (arguments.folder / "best.json").write_bytes(checkpoint)
        self.answer({"score": score})

    def answer(self, body):
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


HTTPServer(("", arguments.port), Evaluator).serve_forever()
