"""cloudtrain prices: show the price lists that plans use, or read them anew."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cloudtrain.cli.view import options, terminal
from cloudtrain.errors import BackendError, BadRequest, CloudtrainError
from cloudtrain.forecast import prices
from cloudtrain.job import targets
from cloudtrain.job.units import PRICE_LIST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cloudtrain.forecast.prices import PriceList


@options.command()
@options.argument(
    "action", "[refresh]", "Download lists. Without it, the stored lists are shown.", type=click.Choice(["refresh"])
)
@options.argument(
    "names",
    "[LIST...]",
    "With refresh only: the lists to download, as PROVIDER/REGION. Providers: sagemaker, vertex, and aws, gcp, runpod for "
    "machines that you rent there. Default: all stored lists, and those that the targets in cloudtrain.toml need.",
    nargs=-1,
)
@click.option(
    "--google-key-env",
    metavar="NAME",
    help="Environment variable with an API key for Google's Billing Catalog; without it Vertex AI's prices are estimates.",
)
@options.json_option
def command(action: str | None, names: tuple[str, ...], google_key_env: str | None, as_json: bool) -> int:
    """Show the price lists that plans use, or refresh them.

    No command but `cloudtrain prices refresh` downloads prices. When a download fails, the stored list stays.

    \b
    cloudtrain prices
    cloudtrain prices refresh sagemaker/eu-west-1 aws/us-east-1
    cloudtrain prices refresh vertex/us-central1 --google-key-env GOOGLE_API_KEY
    """
    home = targets.home()
    problems = []
    if action:
        key = _google_key(google_key_env)
        problems = [f"{name}: {why}" for name in _wanted(home, names) if (why := _refresh(home, name, key))]
    lists = list(prices.stored(home))
    if as_json:
        terminal.print_json([{**vars(each), "age_days": prices.age_days(each.as_of)} for each in lists], indent=2)
    elif lists:
        terminal.print_table(
            ("list", "machines", "read on", "age", "source"), [_row(each) for each in lists], right=("machines", "age")
        )
    else:
        terminal.print_lines("no list is stored: plans use the prices built into cloudtrain")
        terminal.print_pairs([("next", "cloudtrain prices refresh sagemaker/us-east-1")])
    if problems:
        kept = "stored lists stay as they were" if lists else "plans use the prices built into cloudtrain"
        hint = "try again later, upgrade cloudtrain, or set resources.usd_per_hour in the job"
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


def _google_key(variable: str | None) -> str:
    if not variable:
        return ""
    if key := os.environ.get(variable, "").strip():
        return key
    raise BadRequest(f"--google-key-env {variable}: the variable is not set", f"export {variable}=... sets it")


def _wanted(home: Path, names: tuple[str, ...]) -> list[str]:
    """Return the lists to read: those named, or those that are stored or that targets need; raises BadRequest."""
    wrong = [name for name in names if not re.fullmatch(PRICE_LIST, name)]
    if wrong:
        hint = "write PROVIDER/REGION, as in sagemaker/us-east-1; providers are sagemaker, vertex, aws, gcp and runpod"
        raise BadRequest(f"there is no price list {', '.join(wrong)}", hint)
    wanted = sorted({*names} or {*(each.name for each in prices.stored(home)), *_of_targets()})
    if not wanted:
        raise BadRequest(
            "no list is stored, and no target in cloudtrain.toml needs one", "give one, such as sagemaker/us-east-1"
        )
    return wanted


def _of_targets() -> Iterator[str]:
    for target in targets.named_targets().values():
        options = target.options.value
        region = options.get("region") or prices.SHIPPED.get(target.backend)
        if target.backend in prices.SHIPPED and re.fullmatch(PRICE_LIST, f"{target.backend}/{region}"):
            yield f"{target.backend}/{region}"
        elif match := re.match(PRICE_LIST + "/", str(options.get("priced_as", ""))):
            yield match[0].rstrip("/")
