"""Describe a plan for a person: where it goes, what it runs, what it costs, and its request in short."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import registry
from cloudtrain.backends.manifest import missing_secrets
from cloudtrain.cli.view import terminal
from cloudtrain.errors import BadRequest
from cloudtrain.job import configfile, homes, targets
from cloudtrain.job.units import duration_s, format_duration, format_size
from cloudtrain.job.units import usd as _usd

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan

MOST_NOTES = 5  # lines without --verbose
LAUNCHER = ("CLOUDTRAIN_", "ct_manifest_")  # the job once more, packed, and places on the node
LINES = 3  # a text with so many line breaks is unreadable as JSON
LONGEST = 400  # characters of a text


def print_plan(plan: Plan, *, heading: str = "", verbose: bool = False, more: Sequence[tuple[str, str]] = ()) -> None:
    """Print the summary of a plan with `more` rows; its notes are ordered by importance, all of them with `verbose`."""
    details = [(plan.at_most or {}).get("parts") if describe_cost(plan) else "", _describe_source_of_price(plan)]
    notes = [*(str(text) for text in details if text and verbose), *plan.notes]
    left_out = 0 if verbose else len(notes[MOST_NOTES:])
    terminal.print_lines(heading or f"{plan.run_id}  would go to {describe_target(plan)}", style="bold")
    rows = [
        ("world", describe_nodes(plan)),
        ("limit", f"{describe_limit(plan)} ({_limit_key(plan)}), {_describe_attempts(plan)}"),
        ("setup", _first_line(str(plan.job.get("setup") or ""))),
        *(("runs", each) for each in describe_commands(plan)),
        ("secrets", _describe_secrets(plan)),
        ("source", describe_source(plan)),
        ("keeps", _describe_kept(plan)),
        *_forecast_rows(plan),
        ("price", in_currency(_describe_price(plan))),
        ("cost", in_currency(describe_cost(plan))),
        *(("policy", _describe_policy(policy)) for policy in plan.policies),
        *(("note", text) for text in notes[: len(notes) - left_out]),
        ("notes", f"{left_out} more: cloudtrain plan --verbose prints all" if left_out else ""),
    ]
    if plan.candidates:
        terminal.print_pairs(rows)
        _print_candidates(plan)
        rows = []
    terminal.print_pairs([*rows, *more])


def _describe_kept(plan: Plan) -> str:
    """Return which files of the script's folder come home, and where they go; "" where none do."""
    from cloudtrain.runs.planning import attempts

    patterns = plan.job.get("keep", "auto")
    if not patterns or patterns == "none" or plan.job.get("trainer"):
        return ""
    limit = plan.job.get("keep_limit") or "20GB"
    what = f"what the script writes in its folder, at most {limit}" if patterns == "auto" else ", ".join(patterns)
    place = attempts.output(plan)
    if place and not registry.traits(plan.backend).packs:
        return f"{what}: {place}/{plan.run_id}/outputs (keep)"
    return f"{what}: `cloudtrain fetch` copies it into outputs/ (keep)"


def _describe_secrets(plan: Plan) -> str:
    """Return where the job's own secrets come from, and which ones this shell does not have."""
    sources = plan.manifest.get("secrets") or {}
    own = [name for name in plan.job.get("secrets") or {} if name in sources]
    said = ", ".join(f"{name} from {' or '.join(sources[name])}" for name in own)
    missing = [name for name in missing_secrets(plan) if name in own]
    return f"{said}; not set in this shell, so that submit refuses the job: {', '.join(missing)}" if missing else said


def print_manifest(plan: Plan) -> None:
    """Print what the launcher will run, which a request has encoded (CLOUDTRAIN_MANIFEST_0, ct_manifest_0)."""
    import json

    terminal.print_lines("", "manifest (what the launcher runs; the request has it encoded):")
    terminal.print_coloured_json(json.dumps(dict(plan.manifest), indent=2, ensure_ascii=False) + "\n")


def _forecast_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return the rows on memory and time; one where both are unknown for the same reason."""
    fit, time = (str((found or {}).get("line", "")) for found in (plan.fit, plan.time))
    if fit == time and fit.startswith("unknown: "):
        return [("fit", f"unknown, as the time is: {fit.removeprefix('unknown: ')}")]
    return [("fit", fit), ("time", time)]


def _print_candidates(plan: Plan) -> None:
    """Print where a run may go, in the order in which it is tried."""
    head: tuple[str, ...] = ("candidate", "backend", "GPUs", "fit", "time", "USD an hour", "USD in all", "why not")
    cap = _usd(str(plan.job["limits"].get("max_cost") or "")) if plan.job["limits"].get("max_cost") else 0.0
    expected = plan.candidates[0]["of"] == "forecast"
    head = (*head[:7], *(("at most",) if expected else ()), *(("cap lasts",) if cap else ()), head[7])
    rows = []
    for row in plan.candidates:
        most = [(row.get("at_most") or {}).get("usd")] if expected else []
        usd = [f"{each:.2f}" if each is not None else "?"
               for each in (row.get("usd_per_hour"), row.get("total_usd"), *most)]  # fmt: skip
        texts = [str(row.get(name) or "") for name in ("target", "backend", "accelerators", "fit")]
        took = format_duration(row["time_s"]) if row.get("time_s") else ""
        per_hour = row.get("usd_per_hour") or 0
        lasts = [format_duration(cap / per_hour * 3600) if per_hour and not row["why_not"] else ""] if cap else []
        rows.append((*texts, took, *(usd if row["why_not"] == "" else [""] * len(usd)), *lasts, str(row["why_not"])))
    terminal.print_lines("")
    unknown = [at for at, name in enumerate(head) if name in ("fit", "time") and not any(row[at] for row in rows)]
    head, *rows = [tuple(cell for at, cell in enumerate(row) if at not in unknown) for row in (head, *rows)]
    terminal.print_table(head, rows, right=("USD an hour", "USD in all", "at most", "cap lasts"), spare=("backend",))
    limits, prefer = plan.job["limits"], plan.job.get("prefer", "cost")
    order = {"time": "fastest first", "order": "as written"}.get(prefer, "cheapest first") + f" (prefer: {prefer})"
    whole = f"one attempt of {limits['max_runtime']} (limits.max_runtime)"
    if expected:
        whole = "the forecast"
    if limits.get("max_cost"):
        order += ", which limits.max_cost does not change"
        whole += f", but not more than {limits['max_cost']} (limits.max_cost)"
    lines = [f"cap lasts: the time that {limits['max_cost']} buy there (limits.max_cost)"] if cap else []
    if len(unknown) == 2:
        lines.append("fit, time: not estimated for this script; `cloudtrain fit` estimates a model that you name")
    lines += dict.fromkeys(f"why not: {row['hint']}" for row in plan.candidates if row.get("hint"))
    terminal.print_lines(f"order: {order}", f"USD in all: {whole}", *lines)


def describe_nodes(plan: Plan) -> str:
    """Describe nodes, processes, GPUs and the strategy of a plan."""
    parallelism = plan.manifest.get("parallelism") or {}
    strategy = parallelism.get("strategy", "none")
    layout = [strategy] * (strategy not in ("none", "ddp"))
    layout += [f"{name} {size}" for name in ("tp", "pp", "cp") if (size := parallelism.get(f"{name}_size", 1)) > 1]
    return ", ".join([_describe_worlds(plan), *layout])


def _describe_worlds(plan: Plan) -> str:
    return "; ".join(
        (f"{each['name']} " if "name" in each else "")
        + f"{_count(int(each['nodes']), 'node')} x {_count(int(each['processes_per_node']), 'process', 'processes')}"
        + (f", {_count(gpus, 'GPU')} a node" if (gpus := int(each.get("gpus_per_node") or 0)) else "")
        for each in _programs(plan)
    )


def _programs(plan: Plan) -> list[dict[str, Any]]:
    """Return the program of each role with its nodes, the main one first; of a job without roles its only one."""
    return [{**plan.manifest, **role} for role in plan.manifest.get("roles") or [{}]]


def describe_target(plan: Plan) -> str:
    """Return the target with its backend."""
    return plan.backend if plan.target in ("", plan.backend) else f"{plan.target} ({plan.backend})"


def describe_limit(plan: Plan) -> str:
    """Describe the longest time of an attempt."""
    return f"at most {format_duration(float(plan.manifest['max_runtime_s']))}"


def _limit_key(plan: Plan) -> str:
    """Return the field of the job that limits an attempt: a cap on the run may leave less than limits.max_runtime."""
    limits = plan.job.get("limits") or {}
    if plan.manifest["max_runtime_s"] >= duration_s(str(limits.get("max_runtime") or "0s")):
        return "limits.max_runtime"
    return " and ".join(f"limits.{name}" for name in ("max_cost", "max_total_runtime") if limits.get(name))


def _describe_attempts(plan: Plan) -> str:
    most = int((plan.job.get("retry") or {}).get("max_attempts", 1))
    if plan.attempt > 1:  # a person may start more than are started by themselves
        return f"attempt {plan.attempt} (retry.max_attempts is {most})"
    return f"{_count(most, 'attempt')} (retry.max_attempts)"


def _first_line(text: str) -> str:
    """Return the first line of a shell text, with ... where there is more."""
    first, _, rest = text.strip().partition("\n")
    shown = first[:200] if first.isprintable() else repr(first[:200])
    return f"{shown}{' ...' if rest or len(first) > 200 else ''}"


def describe_commands(plan: Plan) -> list[str]:
    """Return each role's command without the interpreter, quoted for a shell; of a shell text its first line."""
    return [_describe_program(each) for each in _programs(plan)]


def _describe_program(program: Mapping[str, Any]) -> str:
    import shlex

    role = f"{program['name']}: " if "name" in program else ""
    if program.get("form") == "shell":
        where = "of sbatch, on the first node" if program.get("compat") == "sbatch" else "once per node"
        return f"{role}{_first_line(str(program['argv'][0]))}  (run, {where})"
    argv = [str(argument) for argument in program["argv"]]
    text = role + " ".join(shlex.quote(argument) if argument.isprintable() else repr(argument) for argument in argv)
    return text if len(text) <= 300 else text[:297] + "..."


def describe_source(plan: Plan) -> str:
    """Describe the packaged source: folder, files, size, commit."""
    bundle = plan.bundle
    commit = (
        f", commit {bundle['commit'][:12]}{' with changes' if bundle.get('dirty') else ''}"
        if bundle.get("commit")
        else ""
    )
    files = _count(int(bundle["files"]), "file")
    size = f"{format_size(bundle['size_bytes'])} packed with cloudtrain's launcher"
    return f"{plan.job.get('source', '')} ({files}, {size}{commit})"


def in_currency(text: str) -> str:
    """Return a text with its amounts in the user's currency too, by the rate in the configuration that counts here.

    As it is where that cannot be read: a run can be shown all the same, and what plans says what is wrong.
    """
    with suppress(BadRequest):
        return configfile.in_currency(text, targets.config_files(Path.cwd()))
    return text


def _describe_price(plan: Plan) -> str:
    from cloudtrain.forecast.prices import describe_age, describe_none

    price: Any = plan.price
    if not price:
        return describe_none(registry.create_for(plan, homes.home()), plan)
    about = "about " if price.get("estimate") else ""
    facts = [price["machine"]] if price.get("machine") else []
    facts += [f"an estimate: {price['estimate']}"] if price.get("estimate") else []
    facts.append(_short(str(price["source"])))
    if price.get("as_of"):
        facts.append(f"{price['as_of']}, {describe_age(price['as_of'])}")
    spot = ""
    if price.get("spot"):
        low, high = price["spot"]
        days = f"{f' to {high:g}' if high > low else ''} ({'30 days to ' if high > low else ''}{price['spot_as_of']})"
        spot = f", on spot {low:g}{days}"
    return f"{about}{price['usd_per_hour']} USD an hour{' on demand' if spot else ''} ({'; '.join(facts)}){spot}"


def _short(source: str) -> str:
    """Return one word for where a price is from: the host of an address, or the first word of a list's long name."""
    if host := re.search(r"https?://([^/\s]+)", source):
        return host[1]
    return re.split(r"[ ,/]", source)[0] if re.search("[,/]", source) else source


def _describe_source_of_price(plan: Plan) -> str:
    """Return where a price can be looked up; "" where its source is all that is known."""
    price = plan.price or {}
    place = price.get("url") or price.get("source") or ""
    return f"price from {place}" if place != _short(str(price.get("source") or "")) else ""


def describe_cost(plan: Plan) -> str:
    """Return what the run will probably cost and can cost at most, or why nothing bounds it; "" without a price and a cap."""
    unpriced = [str(row["target"]) for row in plan.candidates if not row["why_not"] and row["usd_per_hour"] is None]
    unknown = [
        f"{target}: price not known (set usd_per_hour in section [targets.{target}] of cloudtrain.toml)"
        for target in dict.fromkeys(unpriced)
    ]
    known, usd = _describe_known_cost(plan), (plan.time or {}).get("usd")
    expected = [f"expected {usd[0]:.2f} to {usd[1]:.2f} USD"] if usd else []
    return "; ".join([*expected, known, *unknown]) if known else ""


def _describe_known_cost(plan: Plan) -> str:
    """Return what the candidates with a price can cost at most."""
    possible = [row for row in plan.candidates if (row.get("at_most") or {}).get("usd") is not None]
    if not possible or not plan.at_most:
        return _describe_case(plan, plan.at_most)
    own = _own_row(plan).get("at_most") or plan.at_most
    dearest = max(possible, key=lambda row: float(row["at_most"]["usd"]))
    usd = float(dearest["at_most"]["usd"])
    if usd <= float(own["usd"] or 0):
        return _describe_case(plan, plan.at_most)
    elsewhere = f"at most {usd:.2f} USD if it moves to {dearest['target']} ({dearest['accelerators']})"
    return "; ".join(text for text in (_describe_case(plan, own), elsewhere) if text)


def _own_row(plan: Plan) -> Mapping[str, Any]:
    """Return the candidate that a plan is of; empty where it is none."""
    own = plan.target, plan.job["resources"]["accelerators"]
    return next((row for row in plan.candidates if (row["target"], row["accelerators"]) == own), {})


def _describe_case(plan: Plan, case: Mapping[str, Any] | None) -> str:
    limits = plan.job.get("limits") or {}
    if not case or not (plan.price or limits.get("max_cost") or limits.get("max_total_runtime")):
        return ""
    if case["unbounded"]:
        return f"no cost limit: {case['unbounded']}"
    nodes = _count(plan.machines, "node")
    each = f"{format_duration(case['attempt_s'])} on {nodes}"
    capped = limits.get("max_cost") or limits.get("max_total_runtime")
    each = f"this attempt {each}" if capped else f"{_count(case['attempts'], 'attempt')} of {each}"
    most = f"{case['usd']:.2f} USD" if case["usd"] is not None else limits.get("max_total_runtime") or ""
    if (run_usd := case.get("run_usd")) is not None:
        most += f", {run_usd:.2f} USD without the wait"
    return (f"at most {most} ({each})" if most else f"at most {each}") + (f"; {case['note']}" if case["note"] else "")


def _describe_policy(policy: Mapping[str, Any]) -> str:
    """Return where a policy is from, its size and digest, and the age of a pinned copy; or the code of an installed package."""
    if policy.get("code"):
        return f"{policy['code']}, installed code"
    facts = [_count(int(policy["rules"]), "rule"), f"sha256 {policy['sha256'][:12]}"]
    if policy["as_of"]:
        from cloudtrain.policy.pin import OLD_DAYS, age_days

        age = age_days(policy["as_of"])
        facts.append(f"pinned {_count(age, 'day')} ago" if age else "pinned today")
        facts += ["old: cloudtrain doctor fetches it again"] * (age > OLD_DAYS)
    return f"{policy['from'] or policy['file']} ({', '.join(facts)})"


def _count(number: int, singular: str, plural: str = "") -> str:
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def shorten(request: Any) -> tuple[Any, int]:
    """Return a request with only what a person would check, and how many values were left out or cut."""
    if isinstance(request, Mapping):
        inner = {name: shorten(value) for name, value in request.items() if not str(name).startswith(LAUNCHER)}
        hidden = len(request) - len(inner) + sum(count for _, count in inner.values())
        return {name: value for name, (value, _) in inner.items()}, hidden
    if isinstance(request, list | tuple):
        entries = [shorten(entry) for entry in request if not _is_launchers(entry)]
        return [entry for entry, _ in entries], len(request) - len(entries) + sum(count for _, count in entries)
    if isinstance(request, str) and len(request) > LONGEST:
        return f"{request[:LONGEST]}... ({len(request):,} characters)", 1
    return request, 0


def take_out_texts(request: Any, path: str = "") -> tuple[Any, dict[str, str]]:
    """Return a request with a remark instead of each text of several lines, such as a batch script, and these by path."""
    texts: dict[str, str] = {}
    if isinstance(request, str) and request.count("\n") >= LINES:
        return f"{request.count(chr(10))} lines, printed below", {path: request}
    if isinstance(request, Mapping):
        found = {
            name: take_out_texts(value, f"{path}.{name}" if path else str(name)) for name, value in request.items()
        }
        for _, inner in found.values():
            texts |= inner
        return {name: value for name, (value, _) in found.items()}, texts
    if isinstance(request, list | tuple):
        entries = [take_out_texts(entry, f"{path}[{number}]") for number, entry in enumerate(request)]
        for _, inner in entries:
            texts |= inner
        return [value for value, _ in entries], texts
    return request, texts


def _is_launchers(entry: Any) -> bool:
    """Return whether an entry is a variable: {"name": ..., "value": ...} or NAME=VALUE, as Akash writes it."""
    if isinstance(entry, str):
        return entry.startswith(LAUNCHER) and "=" in entry
    return isinstance(entry, Mapping) and str(entry.get("name", "")).startswith(LAUNCHER) and len(entry) <= 2
