"""How fast objects travel to and from S3 (moto's server) and Cloud Storage (the simulator), and in how much memory.

    python benchmarks/transfers.py [--megabytes 256]

Client and server are processes of this machine, so the figures are those of the code, not of a network.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import report, table

SERVERS = {
    "s3": "from moto.server import ThreadedMotoServer as M; s = M('127.0.0.1', 0, False); s.start(); "
    "print('http://127.0.0.1:%d' % s.get_host_and_port()[1], flush=True); import time; time.sleep(3600)",
    "gs": "from pathlib import Path; from cloudtrain.simulators.gcs import Storage; "
    "from cloudtrain.simulators.http import Server; import sys, time; s = Storage(Path(sys.argv[1])); "
    "s.create_bucket('bucket'); print(Server(s.routes).url, flush=True); time.sleep(3600)",
}
CLIENT = """
import json, pathlib, sys, time
from cloudtrain.backends.aws import Aws
from cloudtrain.backends.google import GoogleApi
from cloudtrain.backends.store.gcs import Gcs
from cloudtrain.backends.store.s3 import S3
kind, url, way, path, out = sys.argv[1:]
path, out = pathlib.Path(path), pathlib.Path(out)
if kind == "s3":
    aws = Aws("sagemaker", "us-east-1", None, url)
    aws.client("s3")
    objects = S3(aws, f"s3://bucket/run/{path.name}/")
    if way == "make":
        aws.call("s3", "create_bucket", Bucket="bucket")
        sys.exit()
else:
    objects = Gcs(GoogleApi("r", lambda: url), f"gs://bucket/run/{path.name}/")
begin = time.perf_counter()
objects.add("m", path) if way == "upload" else objects.bring("", out)
took = time.perf_counter() - begin
peak = pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
print(json.dumps([took, int(peak) / 1024]))
"""
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=256)
    large = parser.parse_args().megabytes
    rows, gates = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind, script in SERVERS.items():
            server = subprocess.Popen(
                [sys.executable, "-c", script, str(folder / kind)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            try:
                url = server.stdout.readline().decode().strip() if server.stdout else ""
                if kind == "s3":
                    client(kind, url, "make", folder, folder)
                peaks = {}
                for megabytes in (large // 8, large):
                    path = folder / f"{kind}-{megabytes}"
                    with open(path, "wb") as file:
                        for _ in range(megabytes):
                            file.write(os.urandom(1 << 20))
                    for way in ("upload", "download"):
                        took, peak = client(kind, url, way, path, folder / f"out-{path.name}")
                        rows.append((kind, way, f"{megabytes} MiB", f"{megabytes / took:.0f} MiB/s", f"{peak:.0f} MiB"))
                        peaks[way, megabytes] = peak
                for way in ("upload", "download"):
                    more = peaks[way, large] - peaks[way, large // 8]
                    gates.append((f"{kind} {way}: MiB of memory for {large - large // 8} MiB more", more, 64.0))
            finally:
                server.kill()
                server.wait()
    head = ("store", "way", "size", "rate", "peak memory of the client")
    return report("transfers", "Transfers to and from object stores", table(rows, head), gates)


def client(kind: str, url: str, way: str, path: Path, out: Path) -> list[float]:
    argv = [sys.executable, "-c", CLIENT, kind, url, way, str(path), str(out)]
    done = subprocess.run(argv, env={**os.environ, **KEYS}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout or "[0, 0]")


if __name__ == "__main__":
    sys.exit(main())
