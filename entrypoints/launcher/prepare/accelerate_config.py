"""Translate an Accelerate configuration file into the environment that `accelerate launch` would set."""

from __future__ import annotations

import json
import os
import subprocess

from ..errors import Refused
from ..manifest import Manifest

# It runs under the ranks' interpreter, because Accelerate itself knows its file best, whatever its version. The
# processes are ours to start, so only the variables are taken.
SCRIPT = """
import json, os, sys
from accelerate.commands import launch
from accelerate.utils import launch as environments
path, processes, nodes = sys.argv[1:]
given = ["--config_file", path, "--num_processes", processes, "--num_machines", nodes, "--machine_rank", "0",
         "--main_process_ip", "127.0.0.1", "--main_process_port", "0", "script.py"]
args, defaults, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(given))
if args.use_deepspeed:
    args.deepspeed_fields_from_accelerate_config = ",".join((defaults.deepspeed_config if defaults else None) or {})
before = dict(os.environ)
made = environments.prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else environments.prepare_multi_gpu_env(args)
print("\\n" + json.dumps({name: value for name, value in made.items() if before.get(name) != value}))
"""
OURS = frozenset({"CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PYTHONPATH"})


def environment(python: str, path: str, manifest: Manifest) -> dict[str, str]:
    """Return the variables that the file stands for; blocking (imports Accelerate once). Raises Refused."""
    name = os.path.basename(path)
    if not os.path.isfile(path):
        raise Refused(f"the source has no Accelerate configuration {name}")
    command = [python, "-c", SCRIPT, path, str(manifest.world_size), str(manifest.nodes)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False
    )
    try:
        if done.returncode != 0:
            raise ValueError((done.stderr.strip() or "no reason given").splitlines()[-1])
        variables = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise Refused(f"Accelerate cannot read {name}: {error}") from None
    return {variable: str(value) for variable, value in variables.items() if variable not in OURS}
