"""Budgets of cloudtrain.toml: warn, refuse or ask before a job is sent. Advice of this machine, no limit of a platform.

    [budgets]
    confirm_above = "50 USD"
    all = "2000 USD/month"
    "label.team=nlp" = "500 USD/month"

A budget counts what the runs in this machine's history have spent in the calendar month (UTC), and what live ones may cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.backends import registry
from cloudtrain.errors import BadRequest, OverBudget
from cloudtrain.job import configfile, targets, units
from cloudtrain.job.problems import nearest
from cloudtrain.runs.planning import spend

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan
    from cloudtrain.history.store import Store

WARN_AT = 0.8
REFUSED = ": nothing was submitted"
Confirm = Callable[[str], None]  # asks a person about a sentence; raises where the answer is no


def check(store: Store, plan: Plan, files: Sequence[Path], confirm: Confirm | None = None) -> list[str]:
    """Return warnings of budgets that are nearly spent, and ask where the configuration wants that; blocking.

    Args:
        store: whose runs count.
        plan: what is about to be sent.
        files: configuration files, of which the later ones win key by key.
        confirm: asks about a run that may cost more than `confirm_above`; None never asks.

    Raises:
        OverBudget: a budget is spent.
        BadRequest: a budget is for a target that does not exist.
    """
    settings: dict[str, str] = {}
    for path in files:
        settings |= configfile.read(path).value.get("budgets") or {}
    above = settings.pop("confirm_above", None)
    _check_targets(settings, plan)
    mine = {selector: text for selector, text in settings.items() if _matches(selector, plan)}
    notes = _check_monthly(store, plan, mine) if mine else []
    if confirm and above and (sentence := _unconfirmed(plan, units.usd(above))):
        confirm(f"{sentence} (confirm_above is {above})")
    return notes


def _check_targets(settings: dict[str, str], plan: Plan) -> None:
    """Raise BadRequest for a budget of a target that does not exist: it would limit nothing."""
    named = [selector.partition("=")[2] for selector in settings if selector.startswith("target=")]
    if not (unknown := {name for name in named if name != plan.target and name not in registry.Names()}):
        return
    known = targets.named_targets()
    for name in sorted(unknown - known.keys()):
        near = nearest(name, [*known, *registry.names()])
        hint = f"did you mean target={near}?" if near else f"choose from {', '.join([*known, *registry.names()])}"
        raise BadRequest(f'the budget "target={name}" in [budgets] of cloudtrain.toml is for no known target', hint)


def _matches(selector: str, plan: Plan) -> bool:
    name, _, wanted = selector.partition("=")
    labels = plan.job.get("labels") or {}
    values = {"all": "", "target": plan.target or plan.backend, "user": targets.submitter(labels)}
    return values.get(name, labels.get(name.removeprefix("label."))) == wanted


def _check_monthly(store: Store, plan: Plan, budgets: dict[str, str]) -> list[str]:
    notes = []
    month = store.clock.utc().strftime("%Y-%m")
    shares, live = spend.shares(store, month), spend.committed(store)
    most = _most_usd(plan)
    for selector, text in budgets.items():
        limit_usd = units.usd_per_month(text)
        name, _, value = selector.partition("=")
        total, rest = spend.Sum(selector), spend.Sum(selector)
        for into, counted in ((total, shares), (rest, live)):
            for share in counted:
                if name == "all" or share.group(name) == value:
                    into.add(share)
        used = f"the budget {selector} is {text}, of which {total.usd:.2f} USD are spent in {month}"
        if total.unpriced_s:
            used += f" (and {units.format_duration(total.unpriced_s)} of nodes without a price)"
        if rest.usd:
            used += f", and live runs may cost {rest.usd:.2f} USD more"
        taken_usd = total.usd + rest.usd
        if taken_usd >= limit_usd:
            raise OverBudget(f"{used}{REFUSED}", "raise it in [budgets] of cloudtrain.toml; it limits new runs of "
                "this"
                             " machine only, and limits.max_cost limits a single run")  # fmt: skip
        if taken_usd >= WARN_AT * limit_usd or taken_usd + (most or 0.0) > limit_usd:
            next_usd = f"; this run may cost {most:.2f} USD more" if most is not None else ""
            notes.append(f"{used}{next_usd}. This budget counts the runs of this machine only, and never stops a run")
    return notes


def _unconfirmed(plan: Plan, above_usd: float) -> str:
    """Return what a run may cost where that is more than an amount or not known; "" where it is less, or costs nothing."""
    most = _most_usd(plan)
    if most is not None:
        return f"{plan.run_id} may cost {most:.2f} USD" if most > above_usd else ""
    if plan.price:
        return f"nothing limits what {plan.run_id} may cost"
    if registry.backend_class(plan.backend).traits.prices:
        return f"what {plan.run_id} may cost is unknown"
    return ""


def _most_usd(plan: Plan) -> float | None:
    """Return what a run can cost at most, whichever of its candidates it runs on; None without a price."""
    return (plan.at_most or {}).get("usd")
