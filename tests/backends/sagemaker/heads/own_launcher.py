"""A script that starts itself again with the user's arguments, as scripts with a launcher of their own do."""

import json
import os
import subprocess
import sys

if "AGAIN" not in os.environ:
    hosts, current = json.loads(os.environ["SM_HOSTS"]), os.environ["SM_CURRENT_HOST"]
    interface = os.environ["SM_NETWORK_INTERFACE_NAME"]
    env = {**os.environ, "AGAIN": "1", "NODE": str(hosts.index(current)), "NCCL_SOCKET_IFNAME": interface}
    script = os.path.join(os.environ["SM_MODULE_DIR"], os.environ["SM_USER_ENTRY_POINT"])
    command = [sys.executable, script, *json.loads(os.environ["SM_USER_ARGS"])]
    sys.exit(subprocess.call(command, env=env))
assert sys.argv[1:] == ["--epochs", "1", "--name", "x"] and os.environ["NODE"] == "0", sys.argv
assert os.path.isdir(os.environ["SM_OUTPUT_DIR"]) and int(os.environ["SM_NUM_CPUS"]) > 0
with open(os.path.join(os.environ["SM_MODEL_DIR"], "model.bin"), "w") as model:
    model.write("again")
print("loss: 1.5")
