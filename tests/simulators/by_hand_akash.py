"""A deployment on Akash by the documented routes alone, with nothing of cloudtrain: what a person's script does.

Routes: akash-network/console, apps/api/src (2026-08); SDL: akash-network/chain-sdk, testdata/sdl/input/v2.0. Prints JSON.
Usage: by_hand_akash.py CONSOLE_ADDRESS API_KEY FILE   (FILE is written by the second service)
"""

import json
import sys
import time
import urllib.error
import urllib.request

CONSOLE, KEY, FILE = sys.argv[1:]
SDL = f"""
version: "2.0"
services:
  server:
    image: python:3.12
    command: [python3, -c]
    args:
      - |
        import http.server, os
        http.server.HTTPServer((os.environ["SERVER_SERVICE_HOST"], 8080), http.server.SimpleHTTPRequestHandler).serve_forever()
    expose:
      - port: 8080
        as: 80
        to:
          - global: true
          - service: worker
  worker:
    image: python:3.12
    command: [python3, -c]
    args:
      - |
        import os, time, urllib.request
        while True:
            try:
                urllib.request.urlopen("http://%s:8080/" % os.environ["SERVER_SERVICE_HOST"], timeout=5).read()
                break
            except OSError:
                time.sleep(0.1)
        with open({FILE!r}, "a") as file:
            file.write(os.environ["GREETING"] + "\\n")
    env:
      - GREETING=reached the server
    expose:
      - port: 9
        to:
          - service: server
profiles:
  compute:
    small:
      resources:
        cpu: {{units: 1}}
        memory: {{size: 512Mi}}
        storage: [{{size: 1Gi}}]
  placement:
    anywhere:
      pricing:
        small: {{denom: uact, amount: 10000}}
deployment:
  server: {{anywhere: {{profile: small, count: 1}}}}
  worker: {{anywhere: {{profile: small, count: 1}}}}
"""


def ask(method, path, body=None, headers=None):
    data = None if body is None else (body if isinstance(body, bytes) else json.dumps(body).encode())
    headers = {"Content-Type": "application/json", **({"x-api-key": KEY} if headers is None else headers)}
    try:
        with urllib.request.urlopen(urllib.request.Request(CONSOLE + path, data, headers, method=method)) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


seen = {"without_key": ask("GET", "/v1/deployments", headers={})}
seen["bad_sdl"] = ask("POST", "/v1/deployments", {"data": {"sdl": "version: '9'"}})
status, created = ask("POST", "/v1/deployments", {"data": {"sdl": SDL}})
dseq = created["data"]["dseq"]
seen["created"] = [status, sorted(created["data"])]
listed = ask("GET", "/v1/deployments?skip=0&limit=10")[1]["data"]
seen["listed"] = [item["deployment"]["id"]["dseq"] == dseq for item in listed["deployments"]]
bids = ask("GET", f"/v1/bids?dseq={dseq}")[1]["data"]
best = min(bids, key=lambda item: float(item["bid"]["price"]["amount"]))["bid"]
seen["bids"] = [len(bids), best["state"], best["price"]["denom"], sorted(best["id"])]
lease = {name: best["id"][name] for name in ("dseq", "gseq", "oseq", "provider")}
for _ in range(2):  # safe to repeat
    status, leased = ask("POST", "/v1/leases", {"manifest": created["data"]["manifest"], "leases": [lease]})
seen["leased"] = [status, [one["state"] for one in leased["data"]["leases"]]]
until = time.monotonic() + 60
while time.monotonic() < until:
    try:
        with open(FILE) as file:
            lines = file.read().split("\n")
        if len(lines) > 2:  # a service that ends is started again
            break
    except OSError:
        pass
    time.sleep(0.2)
seen["worker"] = lines[:2]
(one,) = ask("GET", f"/v1/deployments/{dseq}")[1]["data"]["leases"]
seen["services"] = sorted(one["status"]["services"])
body = {"data": {"ttl": 600, "leases": {"access": "full"}}}
token = ask("POST", "/v1/create-jwt-token", body)[1]["data"]["token"]
path = f"/lease/{dseq}/{lease['gseq']}/{lease['oseq']}/status"
seen["gateway"] = [
    ask("GET", path, headers={})[0],
    sorted(ask("GET", path, headers={"Authorization": f"Bearer {token}"})[1]),
]
manifest = created["data"]["manifest"].encode()
seen["manifest"] = ask("PUT", f"/deployment/{dseq}/manifest", manifest, {"Authorization": f"Bearer {token}"})
seen["closed"] = [ask("DELETE", f"/v1/deployments/{dseq}") for _ in range(2)]
after = ask("GET", f"/v1/deployments/{dseq}")[1]["data"]
seen["after"] = [after["deployment"]["state"], [[one["state"], one["status"]] for one in after["leases"]]]
seen["listed_after"] = ask("GET", "/v1/deployments?skip=0&limit=10")[1]["data"]["deployments"]
seen["absent"] = ask("GET", "/v1/deployments/123")
print(json.dumps(seen))
