"""`python -m cloudtrain.simulators.azureml FOLDER [PORT]`: serve until Ctrl-C, and print what a target and a shell need."""

from __future__ import annotations

import sys
from pathlib import Path

from cloudtrain.clock import SYSTEM
from cloudtrain.simulators.azureml.server import Simulator

if __name__ == "__main__":
    simulator = Simulator(Path(sys.argv[1]), port=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    sys.stdout.write("\n".join(f"{name} = {value}" for name, value in simulator.options.items()) + "\n")
    sys.stdout.write("\n".join(f"export {name}={value!r}" for name, value in simulator.environ.items()) + "\n")
    sys.stdout.flush()
    try:
        while True:
            SYSTEM.sleep(3600)
    except KeyboardInterrupt:
        simulator.close()
