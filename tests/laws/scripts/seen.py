"""What the scripts share: which keys there are (no values: those come as arguments), and a place to tell what was seen."""

import json
import os
import pathlib
import sys

with open("keys.json") as file:
    EXPECTED = json.load(file)
KEYS = EXPECTED["keys"]  # name -> text, flag, list
COUNT = EXPECTED["args"]  # how many arguments are no hyperparameters
MINE = sys.argv[1 : len(sys.argv) - COUNT]
REST = sys.argv[len(sys.argv) - COUNT :]


def tell(parsed):
    folder = pathlib.Path(os.environ["CLOUDTRAIN_OUTPUT_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    env = {name: text for name, text in os.environ.items() if name.startswith("LAW_")}
    told = {"hyperparameters": parsed, "args": REST, "env": env}
    (folder / "seen.json").write_text(json.dumps(told))
