"""Roles: the programs of one job, each on nodes of its own, or on those of a role that it names (`colocate`).

The keys of the main role's program stand at the top of a job. A node of a role has a launcher and a rank of its own also
where several share a machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from cloudtrain.errors import BadJob, Problem
from cloudtrain.job import placeholders
from cloudtrain.job.problems import quote
from cloudtrain.job.units import duration_s

if TYPE_CHECKING:
    from cloudtrain.job.document import Document
    from cloudtrain.job.model import JobModel
    from cloudtrain.job.sections import Resources

PROGRAM = ("entrypoint", "run", "args", "hyperparameters", "processes_per_node", "env", "setup", "ray", "resources")
_HARDWARE = {"accelerators", "cpus", "memory", "disk_gb", "instance_type"}
_AT_TOP = {
    "requirements": "write environment.requirements at the top",
    "grace": "write limits.grace at the top",
    "image": "write image at the top",
}


J = TypeVar("J", bound="JobModel")


def main_of(data: Mapping[str, Any]) -> str:
    """Return the name of the main role of a job's keys, "" where they name none."""
    from cloudtrain.job.fields import main_role

    return main_role(data.get("roles"))


def lift_main(data: Mapping[str, Any], document: Document | None) -> Mapping[str, Any]:
    """Return a job's keys with those of its main role's program at the top, with the lines at which they were written."""
    roles, main = data.get("roles"), main_of(data)
    own = roles.get(main) if main and isinstance(roles, Mapping) else None
    if not isinstance(roles, Mapping) or not isinstance(own, Mapping):
        return data
    moved = {key: own[key] for key in PROGRAM if own.get(key) and not data.get(key)}
    top, hardware = data.get("resources"), own.get("resources")
    if isinstance(top, Mapping) and isinstance(hardware, Mapping) and hardware and not _HARDWARE & top.keys():
        moved["resources"] = {**top, **hardware}  # a price that the target gives, or use_spot, is no hardware
    for path, mark in list(document.marks.items()) if document else ():
        if path[:2] == ("roles", main) and path[2:] and path[2] in moved:
            document.marks[path[2:]] = mark  # type: ignore[union-attr]
    kept = {key: value for key, value in own.items() if key not in moved}
    if "resources" in moved:  # they are not those of all roles
        roles = {name: {"resources": {}, **role} if isinstance(role, Mapping) else role for name, role in roles.items()}
    return {**data, **moved, "roles": {**roles, main: kept}}


def program(job: JobModel, name: str) -> JobModel:
    """Return the job that a service would be by itself; raises BadJob."""
    role = job.roles[name]
    own = {"processes_per_node": 1} | {key: getattr(role, key) for key in PROGRAM if getattr(role, key)}
    about: dict[str, Any] = {
        key: getattr(job, key) for key in ("name", "source", "inputs", "resources", "allow_secrets")
    }
    if isinstance(role.entrypoint, str):
        about |= {"arg_style": job.arg_style, "distributed_env": job.distributed_env}
    return type(job)(**{**about, **own}, num_nodes=role.num_nodes)


def on_own_machine(job: J, name: str) -> J:
    """Return a job with the hardware, the image and the secrets of one of its services."""
    role = job.roles[name]
    own = role.resources and role.resources.model_copy(update={"use_spot": job.resources.use_spot})
    secrets = {secret: sources for secret, sources in job.secrets.items() if secret in role.secrets}
    changes = {"resources": own or job.resources, "image": role.image or job.image, "secrets": secrets}
    return job.model_copy(update=changes)


def on_own_machines(job: J) -> Iterator[tuple[J, int, int]]:
    """Yield the job of each role's machines, as `on_own_machine` makes it, how many these are, and how many roles they have.

    The main role's come first. Where roles share machines, the job has what they ask for together.
    """
    for host in hosts(job):
        one = on_own_machine(job, host) if host != job.main_role else job
        own = [one.resources, *(on_own_machine(job, name).resources for name in sharing(job, host)[1:])]
        if own[1:]:
            one = one.model_copy(update={"resources": _together(own)})
        yield one, job.main_nodes if host == job.main_role else job.roles[host].num_nodes, len(own)


def _together(parts: Sequence[Resources]) -> Resources:
    """Return what roles ask for together of a machine; no CPUs or memory where one of them leaves its own to the platform."""
    changes: dict[str, Any] = {}
    if gpus := sum(each.gpus for each in parts):
        kind = next(each.accelerator for each in parts if each.gpus)
        changes["accelerators"] = f"{kind}:{gpus}"
    cpus, memory = [each.cpus for each in parts], [each.memory_bytes for each in parts]
    changes["cpus"] = sum(each or 0 for each in cpus) if all(cpus) else None
    changes["memory"] = f"{-(-sum(each or 0 for each in memory) >> 20)}MiB" if all(memory) else None
    return parts[0].model_copy(update=changes)


def services(job: JobModel) -> list[str]:
    """Return the roles beside the main one, in the order of their nodes, which follow the main role's.

    Those that share the nodes of another come after it.
    """
    return [name for host in hosts(job) for name in sharing(job, host)][1:]


def hosts(job: JobModel) -> list[str]:
    """Return the roles that have nodes of their own, the main one first."""
    return [job.main_role, *(name for name, role in job.roles.items() if name != job.main_role and not role.colocate)]


def sharing(job: JobModel, host: str) -> list[str]:
    """Return the roles that run on the nodes of a role, that one first."""
    return [host, *(name for name, role in job.roles.items() if role.colocate == host)]


def machines(job: JobModel) -> list[int]:
    """Return the number of each node's machine, by the node's rank; nodes of roles that share machines have the same."""
    found: list[int] = []
    first = 0
    for host in hosts(job):
        here = range(first, first + job.roles[host].num_nodes)
        found += [*here] * len(sharing(job, host))
        first = here.stop
    return found


def to_manifest(job: JobModel) -> list[dict[str, Any]]:
    """Return a job's roles as the launcher reads them, the main one first; of it only what the job itself does not say."""
    made: list[dict[str, Any]] = []
    for name in (job.main_role, *services(job)):
        role = job.roles[name]
        entry: dict[str, Any] = {"name": name, "nodes": role.num_nodes, "after": role.after, "ports": role.all_ports}
        if made:
            own = program(job, name)
            form, argv = own.node_program()
            entry |= {
                "argv": argv, "form": form, "processes_per_node": own.processes, "rank_env": own.has_rank_env,
                "env": dict(own.env), "setup": own.setup or "", "secrets": role.secrets, "ready": role.ready,
                "ready_s": duration_s(role.ready_timeout), "restart": role.restart,
            }  # fmt: skip
            if role.colocate:
                entry["colocate"] = role.colocate
            if role.resources:
                entry["gpus_per_node"] = role.resources.gpus
            if role.grace:
                entry["grace_s"] = duration_s(role.grace)
            if role.requirements:
                entry["requirements"] = None if role.requirements == "none" else role.requirements
        made.append(entry)
    return made


def find_shared_ports(job: JobModel, host: str = "") -> Iterator[Problem]:
    """Yield the ports that several nodes on one machine use: on the nodes of a role, or where one machine has all nodes."""
    users: dict[int, str] = {}
    where = f"both run on the nodes of {host}" if host else "all nodes are on one machine"
    for name, role in job.roles.items():
        for port in role.all_ports if host in ("", name, role.colocate) else ():
            if port in users or (role.num_nodes > 1 and not host):
                other = users.get(port, f"another node of {name}")
                message = f"uses port {port} as {other} does, and {where}"
                yield Problem(message, f"roles.{name}.ports", "choose another port")
            users[port] = name


def find_taken_gpus(job: JobModel) -> Iterator[Problem]:
    """Yield the services that ask for GPUs where one machine has all nodes, and the main role takes all GPUs."""
    if job.resources.accelerators is None:
        for name in services(job):
            own = job.roles[name].resources
            if own and own.gpus:
                yield _takes_all(job, job.main_role, name)


def _takes_all(job: JobModel, host: str, name: str) -> Problem:
    own = job.roles[name].resources
    hint = f"write how many {host} has, such as accelerators: {own.accelerator if own else ''}:6"
    message = f"asks for GPUs of nodes of which {host} takes all: it has no resources.accelerators"
    return Problem(message, f"roles.{name}.resources.accelerators", hint)


def find_role_problems(job: JobModel) -> Iterator[Problem]:
    """Yield what is wrong with the roles of a job, each of them right by itself."""
    roles, main = job.roles, job.main_role
    mains = [name for name, role in roles.items() if role.main]
    if len(mains) > 1:
        yield Problem(f"{' and '.join(mains)} are main roles, and a run ends with one", "roles", "keep one main: true")
    if not main:
        yield Problem("has no main role, with which the run ends", "roles", "name it trainer, or write main: true")
        return
    for name, role in roles.items():
        yield from _names(name, job)
        if name != main:
            try:
                program(job, name)
            except BadJob as error:
                yield from (Problem(each.message, f"roles.{name}.{each.path}", each.hint) for each in error.problems)
        else:
            for key in (key for key in PROGRAM if getattr(role, key)):
                yield Problem(
                    f"is at the top of the job too, where keys of {main} stand", f"roles.{name}.{key}", "keep one"
                )
            for key in ("ready", "secrets", "requirements", "grace", "image"):
                if getattr(role, key):
                    yield Problem(
                        "is for services, and this is the main role",
                        f"roles.{name}.{key}",
                        _AT_TOP.get(key, "remove it"),
                    )
        if role.resources and role.resources.model_dump(exclude=_HARDWARE, exclude_defaults=True):
            message = (
                "may have accelerators, cpus, memory, disk_gb and instance_type; the rest is the same for all roles"
            )
            yield Problem(message, f"roles.{name}.resources")
        if role.resources and isinstance(role.resources.accelerators, list):
            yield Problem("names several", f"roles.{name}.resources.accelerators", "name one")
        if role.colocate:
            yield from _colocated(name, job)
        if role.grace and duration_s(role.grace) > job.limits.grace_s:
            message = f"is longer than limits.grace ({job.limits.grace}), by which platforms end a node"
            yield Problem(message, f"roles.{name}.grace", "lower it, or raise limits.grace")
    if circle := _circle(job):
        yield Problem(f"waits in a circle: {' after '.join(circle)}", f"roles.{circle[0]}.after", "remove one of them")
    for host in dict.fromkeys(role.colocate for role in roles.values() if role.colocate):
        yield from find_shared_ports(job, host)
    nodes, given = sum(role.num_nodes for role in roles.values()), "num_nodes" in job.model_fields_set
    if given and (job.num_nodes != nodes or "num_nodes" not in roles[main].model_fields_set):
        yield Problem("is the number of nodes of each role", "num_nodes", f"write roles.{main}.num_nodes instead")
    for key in ("min_nodes", "compat"):
        if getattr(job, key) is not None:
            yield Problem("cannot be combined with roles", key, "remove it")
    if job.retry.restarts:
        yield Problem("cannot be combined with roles", "retry.restarts", "remove it")
    if job.parallelism.strategy == "auto":
        yield Problem("is auto, which cannot be combined with roles", "parallelism.strategy", "name a strategy")


def _colocated(name: str, job: JobModel) -> Iterator[Problem]:
    """Yield why a role cannot run on the nodes of the role that it names."""
    role, path = job.roles[name], f"roles.{name}"
    host = job.roles.get(role.colocate or "")
    if name == job.main_role:
        yield Problem("is for services, and this is the main role", f"{path}.colocate", "remove it")
        return
    if host is None or host.colocate:
        why = "no role of this job" if host is None else "which has no nodes of its own"
        hint = f"choose from {', '.join(hosts(job))}"
        yield Problem(f"names {role.colocate}, {why}", f"{path}.colocate", hint)
        return
    if role.num_nodes != host.num_nodes:
        message = f"is {role.num_nodes}, and {role.colocate}, whose nodes it shares, has {host.num_nodes}"
        yield Problem(message, f"{path}.num_nodes", "remove it")
    own, theirs = role.resources, job.resources if role.colocate == job.main_role else host.resources or job.resources
    if own and (given := sorted(own.model_dump(include={"disk_gb", "instance_type"}, exclude_defaults=True))):
        message = f"is that of the nodes of {role.colocate}, which it shares"
        yield Problem(message, f"{path}.resources.{given[0]}", "remove it")
    if own and own.gpus:
        if theirs.accelerators is None:
            yield _takes_all(job, role.colocate or "", name)
        elif theirs.accelerator not in (None, own.accelerator):
            message = (
                f"is {own.accelerator}, and the nodes of {role.colocate}, which it shares, have {theirs.accelerator}"
            )
            yield Problem(message, f"{path}.resources.accelerators", f"write {theirs.accelerator}:{own.gpus}")


def _names(name: str, job: JobModel) -> Iterator[Problem]:
    """Yield names in a role that are no role's, and secrets that are not the job's."""
    role, main = job.roles[name], job.main_role
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,28}[a-z0-9])?", name):
        yield Problem(
            f"is not a valid name of a role: {quote(name)}", f"roles.{name}", "use small letters, digits and -"
        )
    for other in role.after:
        if other not in job.roles:
            yield Problem(
                f"names {other}, no role of this job", f"roles.{name}.after", f"choose from {', '.join(job.roles)}"
            )
    for secret in role.secrets:
        if secret not in job.secrets:
            yield Problem(f"names {secret}, which the job does not have", f"roles.{name}.secrets", "add it to secrets")
    texts = job if name == main else role
    for key, values in (
        ("args", texts.args),
        ("env", texts.env.values()),
        ("hyperparameters", texts.hyperparameters.values()),
    ):
        for other in {each for value in values for each in placeholders.roles(str(value))} - job.roles.keys():
            path = key if name == main else f"roles.{name}.{key}"
            yield Problem(f"uses a placeholder of the role {other}, which the job does not have", path)


def _circle(job: JobModel) -> list[str]:
    """Return roles that wait for each other, [] where none do."""
    done: set[str] = set()
    while ready := [name for name, role in job.roles.items() if name not in done and done.issuperset(role.after)]:
        done.update(ready)
    left = [name for name in job.roles if name not in done]
    path = left[:1]
    while left and path.count(path[-1]) < 2:
        later = next((name for name in job.roles[path[-1]].after if name in left), "")
        if not later:
            return []  # it waits for a name that is no role's
        path.append(later)
    return path[path.index(path[-1]) :] if path else []
