import socket
import urllib.request

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
    urllib.request.urlopen(f"http://127.0.0.1:{port}/data/train.jsonl")
