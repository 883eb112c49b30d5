"""Compare a plan with the rules of policies. Pure: a plan and rules give problems."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.api import Facts, Paths
from cloudtrain.errors import BadJob, Problem
from cloudtrain.job import units

if TYPE_CHECKING:
    from cloudtrain.backends.api import Backend, Plan
    from cloudtrain.policy.files import Policy, Rule


class Refused(BadJob):
    """A policy refuses a job; `problems` holds all that its rules refuse."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(problems)
        head = "the policy refuses this job:"
        self.message = "\n  ".join([head, *map(str, self.problems)])
        self.args = (self.message,)


def find_problems(policies: Sequence[Policy], plan: Plan, backend: Backend) -> list[Problem]:
    """Return all that the rules refuse of a plan, each with its rule; pure."""
    return [problem for policy in policies for rule in policy.rules if holds(rule, plan.target, plan.backend)
            for problem in _of_rule(rule, plan, backend)]  # fmt: skip


def unchecked(policies: Sequence[Policy], plan: Plan, backend: Backend) -> Iterator[str]:
    """Yield the caps of cost that hold for a plan and could not be compared with it; pure."""
    if backend.traits.paths is Paths.HERE or plan.price or backend.traits.prices:
        return
    for policy in policies:
        for rule in policy.rules:
            for key in ("max_cost", "max_usd_per_hour"):
                if key in rule.requires and holds(rule, plan.target, plan.backend):
                    yield (
                        f"the policy's {key} was not checked ({rule.place(key)}): the price of a node is not known;"
                        " set usd_per_hour of the target"
                    )


def holds(rule: Rule, target: str, backend: str) -> bool:
    """Return whether a rule is for a target or its backend."""
    return not rule.on or any(fnmatchcase(name, pattern) for pattern in rule.on for name in (target, backend))


def _of_rule(rule: Rule, plan: Plan, backend: Backend) -> Iterator[Problem]:
    facts = backend.facts(plan)
    for key, wanted in rule.requires.items():
        for path, message, hint in _CHECKS[key](wanted, plan, facts, backend):
            yield Problem(f"{message} ({rule.place(key)}{rule.reason})", path, hint)


Found = Iterator[tuple[str, str, str]]  # the key of the job file, what is wrong, what to do


def _labels(wanted: dict[str, list[str]], plan: Plan, facts: Facts, backend: Backend) -> Found:
    labels = plan.job.get("labels") or {}
    for name, patterns in wanted.items():
        value = labels.get(name)
        if value is None or not _fits(str(value), patterns):
            what = "is not set" if value is None else f"is {value}"
            yield f"labels.{name}", f"{what}; the policy requires {_any_of(patterns)}", f"write labels: {{{name}: ...}}"


def _target(wanted: list[str], plan: Plan, facts: Facts, backend: Backend) -> Found:
    if not _fits(plan.target or plan.backend, wanted):
        yield (
            "target",
            f"is {plan.target or plan.backend}; the policy allows {_any_of(wanted)}",
            "choose another: -t TARGET",
        )


def _backend(wanted: list[str], plan: Plan, facts: Facts, backend: Backend) -> Found:
    if not _fits(plan.backend, wanted):
        yield (
            "target",
            f"is on the backend {plan.backend}; the policy allows {_any_of(wanted)}",
            "choose another: -t TARGET",
        )


def _account(wanted: list[str], plan: Plan, facts: Facts, backend: Backend) -> Found:
    yield from _one(f"options.{plan.backend}.{backend.traits.account}", facts.account, wanted)


def _region(wanted: list[str], plan: Plan, facts: Facts, backend: Backend) -> Found:
    yield from _one(f"options.{plan.backend}.region", facts.region, wanted)


def _one(path: str, value: str | None, wanted: list[str]) -> Found:
    if value is None:
        return
    if not value:
        yield (
            path,
            f"is not set; the policy allows {_any_of(wanted)}",
            f"set {path} in the job, or in its target in cloudtrain.toml",
        )
    elif not _fits(value, wanted):
        yield path, f"is {value}; the policy allows {_any_of(wanted)}", "choose another target"


def _instance_types(wanted: list[str], plan: Plan, facts: Facts, backend: Backend) -> Found:
    path = "resources.instance_type"
    if facts.instance_types is not None and not any(facts.instance_types):
        yield (
            path,
            f"is not set; the policy allows {_any_of(wanted)}",
            "set resources.instance_type, because the plan does not name a machine",
        )
    for name in facts.instance_types or ():
        if name and not _fits(name, wanted):
            yield path, f"is {name}; the policy allows {_any_of(wanted)}", "ask for fewer or other accelerators"


def _output(wanted: list[str], plan: Plan, facts: Facts, backend: Backend) -> Found:
    output = plan.job.get("output")
    if not output or not _fits(str(output), wanted):
        what = f"is {output}" if output else "is not set"
        yield "output", f"{what}; the policy requires {_any_of(wanted)}", "write output: ... in the job file"


def _images_of(facts: Facts) -> Sequence[str]:
    """Return the images of a plan: "" for one that is not known, none where the platform uses no images."""
    if facts.images is None:
        return ()
    return facts.images or ("",)


def _image_by_digest(wanted: bool, plan: Plan, facts: Facts, backend: Backend) -> Found:
    for image in _images_of(facts):
        if "@sha256:" not in image:
            yield (
                "image",
                f"is {image or 'not known'}; the policy requires an image with a digest",
                "write registry/name@sha256:...",
            )


def _images(wanted: list[str], plan: Plan, facts: Facts, backend: Backend) -> Found:
    for image in _images_of(facts):
        if not _fits(image, wanted):
            yield (
                "image",
                f"is {image or 'not known'}; the policy allows {_any_of(wanted)}",
                "write image: ... of these",
            )


def _spot(wanted: bool, plan: Plan, facts: Facts, backend: Backend) -> Found:
    if "resources.use_spot" in backend.traits.keys and not (plan.job.get("resources") or {}).get("use_spot"):
        yield "resources.use_spot", "is false; the policy requires spot machines", "write resources: {use_spot: true}"


def _network_isolation(wanted: bool, plan: Plan, facts: Facts, backend: Backend) -> Found:
    if facts.isolated is None:
        hint = "choose another target, or limit the rule to some targets with its key on = [...]"
        yield "target", f"must have network isolation, which {plan.backend} does not offer", hint
    elif not facts.isolated:
        yield (
            f"options.{plan.backend}.isolate",
            "is false; the policy requires network isolation",
            "write isolate: true",
        )


def _max_runtime(wanted: str, plan: Plan, facts: Facts, backend: Backend) -> Found:
    limits = plan.job.get("limits") or {}
    given = str(limits.get("max_runtime") or "24h")
    if units.duration_s(given) > units.duration_s(wanted):
        yield (
            "limits.max_runtime",
            f"is {given}; the policy allows at most {wanted}",
            f"write limits: {{max_runtime: {wanted}}}",
        )


def _max_cost(wanted: str, plan: Plan, facts: Facts, backend: Backend) -> Found:
    case = plan.at_most or {}
    usd, hint = case.get("usd"), f'write limits: {{max_cost: "{wanted}"}}'
    yield from _understated("max_cost", plan)
    if usd is None and (plan.price or backend.traits.prices):
        why = case.get("unbounded") or "the price is not known"
        yield "limits.max_cost", f"is unknown ({why}); the policy allows at most {wanted}", hint
    elif usd is not None and usd > units.usd(wanted):
        yield "limits.max_cost", f"allows {usd:.2f} USD; the policy allows at most {wanted}", hint


def _max_usd_per_hour(wanted: float, plan: Plan, facts: Facts, backend: Backend) -> Found:
    yield from _understated("max_usd_per_hour", plan)
    usd = (plan.price or {}).get("usd_per_hour")
    if usd is None and backend.traits.prices:
        hint = "set usd_per_hour in the target, or choose a machine of `cloudtrain prices list`"
        yield "resources", f"cost an unknown sum an hour; the policy allows at most {wanted:g} USD", hint
    elif usd is not None and usd > wanted:
        hint = "ask for fewer nodes, or a cheaper machine of `cloudtrain prices list`"
        yield "resources", f"cost {usd:.2f} USD an hour; the policy allows at most {wanted:g} USD", hint


def _max_gpus(wanted: int, plan: Plan, facts: Facts, backend: Backend) -> Found:
    if facts.gpus is None:
        hint = "write resources.accelerators (0 for none), and no machine type or option whose GPUs cloudtrain cannot count"
        yield "resources", f"have an unknown number of GPUs; the policy allows at most {wanted}", hint
    elif facts.gpus > wanted:
        gpus, nodes = (units.format_count(n, what) for n, what in ((facts.gpus, "GPU"), (plan.machines, "node")))
        yield "resources", f"have {gpus} on {nodes}; the policy allows at most {wanted}", "ask for fewer nodes or GPUs"


def _understated(rule: str, plan: Plan) -> Found:
    """Yield the problem of a job that states a lower price than the known one."""
    price = plan.price or {}
    if "known_usd_per_hour" in price:
        key = "usd_per_hour" if plan.job["resources"].get("usd_per_hour") is not None else "priced_as"
        stated, known = price["usd_per_hour"], price["known_usd_per_hour"]
        message = (
            f"makes {stated:.2f} USD an hour, the known price is {known:.2f}; under {rule} a job cannot state less"
        )
        yield f"resources.{key}", message, "remove it, or set usd_per_hour in the target"


_CHECKS: dict[str, Callable[[Any, Plan, Facts, Backend], Found]] = {
    "labels": _labels,
    "targets": _target,
    "backends": _backend,
    "accounts": _account,
    "regions": _region,
    "instance_types": _instance_types,
    "output": _output,
    "image_by_digest": _image_by_digest,
    "images": _images,
    "spot": _spot,
    "network_isolation": _network_isolation,
    "max_runtime": _max_runtime,
    "max_cost": _max_cost,
    "max_usd_per_hour": _max_usd_per_hour,
    "max_gpus": _max_gpus,
}


def _fits(value: str, patterns: Sequence[str]) -> bool:
    return value != "" and any(fnmatchcase(value, pattern) for pattern in patterns)


def _any_of(patterns: Sequence[str]) -> str:
    return "any text" if "*" in patterns else " or ".join(patterns)
