"""cloudtrain prices: show the price lists that plans use and their machines, or read them anew."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cloudtrain.backends import registry
from cloudtrain.cli.view import options, terminal
from cloudtrain.errors import BackendError, BadRequest, CloudtrainError
from cloudtrain.forecast import prices
from cloudtrain.job import targets
from cloudtrain.job.providers import EXAMPLE
from cloudtrain.job.units import PRICE_LIST

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from cloudtrain.forecast.offers import MachineOffer
    from cloudtrain.forecast.prices import PriceList

_EXAMPLE = f"{EXAMPLE}/us-east-1"


def _price(offer: MachineOffer) -> tuple[float, str]:
    return (math.inf if offer.usd_per_hour is None else offer.usd_per_hour, offer.machine)


ORDERS: dict[str, Callable[[MachineOffer], tuple[object, ...]]] = {
    "price": _price,
    "gpus": lambda offer: (-(offer.gpus or 0), *_price(offer)),
    "gpu-memory": lambda offer: (-(offer.gpu_memory_gb or 0), *_price(offer)),
    "memory": lambda offer: (-(offer.memory_gb or 0), *_price(offer)),
}


@options.command()
@options.argument(
    "action",
    "[list|refresh]",
    "list: show machine types with their prices. refresh: download lists. Without it, the stored lists are shown.",
    type=click.Choice(["list", "refresh"]),
)
@options.argument(
    "names",
    "[LIST...]",
    f"The lists to show or to download, as PROVIDER/REGION: {_EXAMPLE}, or aws/us-east-1 for "
    "machines that you rent there. Default: all stored lists, and those that the targets in cloudtrain.toml need.",
    nargs=-1,
)
@click.option(
    "-t",
    "--target",
    metavar="TARGET",
    shell_complete=options.complete_targets,
    help="With list: the list of this target.",
)
@click.option("--gpus", metavar="TYPE[:N]", help="With list: only machines with these GPUs, such as A100 or H100:8.")
@click.option("--max-usd-per-hour", type=float, metavar="USD", help="With list: only machines that cost at most this.")
@click.option(
    "--sort",
    type=click.Choice(list(ORDERS)),
    default="price",
    help="With list: the cheapest first (price, the default), or most GPUs, GPU memory or memory first.",
)
@click.option(
    "--google-key-env",
    metavar="NAME",
    help="Environment variable with an API key for Google's Billing Catalog; without it Vertex AI's prices are estimates.",
)
@options.json_option
def command(
    action: str | None,
    names: tuple[str, ...],
    target: str | None,
    gpus: str | None,
    max_usd_per_hour: float | None,
    sort: str,
    google_key_env: str | None,
    as_json: bool,
) -> int:
    """List machines with prices, and show or refresh price lists.

    No command but `cloudtrain prices refresh` downloads prices. When a download fails, the stored list stays, and the exit
    code is 5.

    \b
    cloudtrain prices
    cloudtrain prices list -t prod --gpus A100
    cloudtrain prices refresh sagemaker/eu-west-1 aws/us-east-1
    cloudtrain prices refresh vertex/us-central1 --google-key-env GOOGLE_API_KEY
    """
    home = targets.home()
    problems = []
    if action == "list":
        chosen = list(_choose(_offers(home, names, target), gpus, max_usd_per_hour))
        _print_offers(sorted(chosen, key=ORDERS[sort]), as_json)
        return 0
    if target or gpus or max_usd_per_hour is not None or sort != "price":
        raise BadRequest("-t, --gpus, --max-usd-per-hour and --sort are options of `cloudtrain prices list`")
    if action:
        key = _google_key(google_key_env)
        problems = [f"{name}: {why}" for name in _wanted(home, names) if (why := _refresh(home, name, key))]
    lists = list(prices.stored_lists(home))
    if as_json:
        terminal.print_json([{**vars(each), "age_days": prices.age_days(each.as_of)} for each in lists], indent=2)
    elif lists:
        terminal.print_table(
            ("list", "machines", "read on", "age", "source"), [_row(each) for each in lists], right=("machines", "age")
        )
    else:
        terminal.print_lines("no list is stored: plans use the prices built into cloudtrain")
        terminal.print_pairs([("next", f"cloudtrain prices refresh {_EXAMPLE}")])
    if problems:
        kept = "stored lists stay as they were" if lists else "plans use the prices built into cloudtrain"
        hint = "try again later, upgrade cloudtrain, or set usd_per_hour of the target in cloudtrain.toml"
        raise BackendError("\n  ".join([f"not read; {kept}:", *problems]), hint)
    return 0


def _row(each: PriceList) -> tuple[str, ...]:
    source = each.source + (f" (estimates: {each.estimate})" if each.estimate else "")
    return each.name, str(len(each.usd_per_hour)), each.as_of, f"{prices.age_days(each.as_of)} d", source


def _refresh(home: Path, name: str, google_key: str) -> str:
    """Read one list; return what went wrong, "" for nothing."""
    from cloudtrain.forecast.refresh import refresh

    try:
        refresh(home, name, google_key)
    except CloudtrainError as error:
        return error.message
    return ""


def _offers(home: Path, names: tuple[str, ...], target: str | None) -> Iterator[MachineOffer]:
    """Yield the machines of the lists that are named, or of a target, or of all targets; raises BadRequest."""
    from cloudtrain.forecast import offers

    if target:
        region = registry.traits(target).prices
        found = [f"{target}/{region}"] if region else list(_of_targets(target))
        if not found:
            hint = f"name one, as in {_EXAMPLE}; a price of your own is usd_per_hour of a target"
            raise BadRequest(f"the target {target} has no price list", hint)
        names = (*names, *found)
    defaults = [f"{name}/{region}" for name in registry.names() if (region := registry.traits(name).prices)]
    for name in _wanted(home, names, defaults):
        known = registry.traits(name.split("/")[0]).prices or prices.machines_of(name)
        if not known and prices.load(home, name) is None:
            raise BadRequest(f"the list {name} is not stored", f"run cloudtrain prices refresh {name}")
        yield from offers.of_list(home, name)


def _choose(found: Iterable[MachineOffer], gpus: str | None, most_usd: float | None) -> Iterator[MachineOffer]:
    """Yield the machines that have the GPUs and cost at most so much; raises BadRequest where there is none."""
    from cloudtrain.backends.machines import matches

    name, _, count = (gpus or "").partition(":")
    empty = True
    for each in found:
        fits = not gpus or (matches(name, each.gpu) and count in ("", str(each.gpus)))
        if fits and (most_usd is None or (each.usd_per_hour is not None and each.usd_per_hour <= most_usd)):
            empty = False
            yield each
    if empty:
        asked = [f"{gpus}"] if gpus else []
        asked += [f"at most {most_usd:g} USD an hour"] if most_usd is not None else []
        raise BadRequest(
            f"no machine in the lists has {' and '.join(asked)}", "cloudtrain prices list shows all of them"
        )


def _print_offers(chosen: list[MachineOffer], as_json: bool) -> None:
    if as_json:
        terminal.print_json([vars(each) for each in chosen], indent=2)
        return
    spot = ["spot"] * any(each.spot for each in chosen)
    headers = ("machine", "GPUs", "GB of a GPU", "cores", "memory GB", "USD an hour", *spot, "price", "list")
    rows = [
        (
            each.machine,
            f"{each.gpu}:{each.gpus}" if each.gpu else "" if each.gpus is None else "-",
            *(f"{fact:g}" if fact is not None else "" for fact in (each.gpu_memory_gb, each.vcpus, each.memory_gb)),
            "not known" if each.usd_per_hour is None else f"{each.usd_per_hour:.3f}",
            *[" to ".join(dict.fromkeys(f"{usd:.3f}" for usd in each.spot or ()))] * len(spot),
            f"estimate: {each.estimate}" if each.estimate else each.as_of,
            each.list,
        )
        for each in chosen
    ]
    right = ("GB of a GPU", "cores", "memory GB", "USD an hour", "spot")
    terminal.print_table(headers, rows, right=right, spare=("price", "list", "memory GB", "spot"))


def _google_key(variable: str | None) -> str:
    if not variable:
        return ""
    if key := os.environ.get(variable, "").strip():
        return key
    raise BadRequest(f"--google-key-env {variable}: the variable is not set", f"export {variable}=... sets it")


def _wanted(home: Path, names: tuple[str, ...], defaults: Iterable[str] = ()) -> list[str]:
    """Return the lists that are named, else those that are stored or that targets need, else `defaults`; or raise BadRequest."""
    known = prices.providers() if names else []
    wrong = [name for name in names if not re.fullmatch(PRICE_LIST, name) or name.split("/")[0] not in known]
    if wrong:
        hint = f"write PROVIDER/REGION, as in {known[0]}/us-east-1; providers are {', '.join(known)}"
        raise BadRequest(f"there is no price list {', '.join(wrong)}", hint)
    wanted = sorted({*names} or {*(each.name for each in prices.stored_lists(home)), *_of_targets()} or defaults)
    if not wanted:
        raise BadRequest(
            "no list is stored, and no target in cloudtrain.toml needs one", f"give one, such as {_EXAMPLE}"
        )
    return wanted


def _of_targets(only: str | None = None) -> Iterator[str]:
    for name, target in targets.named_targets().items():
        if only not in (None, name):
            continue
        options = target.options.value
        region = options.get("region") or registry.traits(target.backend).prices
        if registry.traits(target.backend).prices and re.fullmatch(PRICE_LIST, f"{target.backend}/{region}"):
            yield f"{target.backend}/{region}"
        elif match := re.match(PRICE_LIST + "/", str(options.get("priced_as", ""))):
            yield match[0].rstrip("/")
