"""`python -m cloudtrain.simulators.azureml FOLDER`: serve until Ctrl-C, and print what a target and a shell need."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cloudtrain.clock import SYSTEM
from cloudtrain.simulators.azureml.server import Simulator

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m cloudtrain.simulators.azureml")
    parser.add_argument("folder", type=Path, help="where jobs run")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    asked = parser.parse_args()
    simulator = Simulator(asked.folder, port=asked.port)
    target = [f'{name} = "{value}"' for name, value in simulator.options.items()]
    shell = [f"export {name}='{value}'" for name, value in simulator.environ.items()]
    sys.stdout.write("\n".join([*target, "", *shell]) + "\n")
    sys.stdout.flush()
    try:
        while True:
            SYSTEM.sleep(3600)
    except KeyboardInterrupt:
        simulator.close()
