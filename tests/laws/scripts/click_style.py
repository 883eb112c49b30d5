"""Reads its hyperparameters with click."""

import click
import seen


@click.command()
def script(**found):
    told = {}
    for n, (name, kind) in enumerate(seen.KEYS.items()):
        value = found[f"option_{n}"]
        told[name] = (list(value) if isinstance(value, tuple) else [value]) if kind.startswith("list") else value
    seen.tell(told)


for n, (name, kind) in enumerate(seen.KEYS.items()):
    names = [f"--{name}", f"option_{n}"]
    if kind == "flag":
        script.params.append(click.Option(names, is_flag=True))
    else:
        script.params.append(click.Option(names, nargs=int(kind[4:]) if kind.startswith("list") else 1))
script.main(seen.MINE, standalone_mode=False)
