"""Reads its hyperparameters with argparse."""

import argparse

import seen

parser = argparse.ArgumentParser()
for name, kind in seen.KEYS.items():
    if kind == "flag":
        parser.add_argument(f"--{name}", dest=name, action="store_true")
    else:
        parser.add_argument(f"--{name}", dest=name, nargs="*" if kind == "list" else None)
seen.tell(vars(parser.parse_args(seen.MINE)))
