"""Print the environment that the installed Accelerate's own launch command would give the ranks of a job.

    python -m launcher.prepare.accelerate_launch CONFIG PROCESSES

A short process of its own, under the ranks' interpreter. The launch command does everything but start processes, so that
names and defaults are those of whatever version is installed. The last line that it prints is JSON:

    version       Accelerate's
    variables     what differs from this process's own environment
    unused        keys of the file that neither the launch command nor its FSDP plugin uses
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from .accelerate_keys import WORLD, is_neutral, written

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

OLDEST = (1, 10)
LAUNCHERS = ("simple_launcher", "multi_gpu_launcher", "deepspeed_launcher")
used_arguments: set[str] = set()
used_variables: set[str] = set()


class Taken(BaseException):
    """The launch command was about to start processes; none of its own handlers catches this."""


class Arguments(argparse.Namespace):
    """Parsed arguments that note which of them are used."""

    def __getattribute__(self, name: str) -> Any:
        used_arguments.add(name)
        return super().__getattribute__(name)


class Variables(dict):  # type: ignore[type-arg]
    """An environment that notes which variables are used."""

    def get(self, name: str, default: Any = None) -> Any:
        used_variables.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        used_variables.add(name)
        return super().__getitem__(name)


def main(path: str, processes: str) -> None:
    import accelerate

    if tuple(int(part) for part in accelerate.__version__.split(".")[:2]) < OLDEST:
        raise ValueError(f"version {accelerate.__version__} is installed, 1.10 is the oldest supported version")
    from accelerate.commands import launch

    parser = launch.launch_command_parser()
    world = ["--num_processes", processes, "--num_machines", "1", "--main_process_port", "0"]
    arguments = parser.parse_args(["--config_file", path, *world, "script.py"], Arguments())
    before = dict(os.environ)
    taken = take_environment(launch, arguments)
    variables = {name: value for name, value in taken.items() if before.get(name) != value}
    unused = unused_keys(path, parser, variables)
    print("\n" + json.dumps({"version": accelerate.__version__, "variables": variables, "unused": unused}))


def take_environment(launch: Any, arguments: Arguments) -> dict[str, str]:
    """Let the launch command run up to the start of processes; return the environment that they would have."""
    import torch.distributed.run

    taken: dict[str, str] = {}

    def take(*_: Any, env: Any = None) -> None:
        taken.update(os.environ if env is None else env)
        raise Taken

    def watched(launcher: Any) -> Any:
        def start(args: Any) -> None:
            used_arguments.clear()  # before, all values are copied from the file
            launcher(args)

        return start

    def foreign(*_: Any) -> None:
        raise ValueError("it is for TPUs or SageMaker, where Accelerate starts the processes itself")

    torch.distributed.run.run = take
    launch.subprocess = argparse.Namespace(Popen=take)
    for name in [name for name in vars(launch) if name.endswith("_launcher")]:
        setattr(launch, name, watched(getattr(launch, name)) if name in LAUNCHERS else foreign)
    try:
        launch.launch_command(arguments)
    except Taken:
        return taken
    raise ValueError("accelerate launch starts no processes for it")


def unused_keys(path: str, parser: Any, variables: dict[str, str]) -> list[str]:
    """Return the keys of the file that say something and change nothing, in the file's order."""
    import yaml
    from accelerate.commands.config.config_args import ClusterConfig

    with open(path, encoding="utf-8") as file:
        content = yaml.safe_load(file)
    dropped = dropped_by_plugin(variables)
    unused = []
    for section, values in content.items():
        nested = isinstance(values, dict)
        for key, value in values.items() if nested else [(section, values)]:
            name = key
            if nested and not key.startswith(section.partition("_")[0]) and section != "deepspeed_config":
                name = section.partition("_")[0] + "_" + key
            default = getattr(ClusterConfig, name, None) if not nested else parser.get_default(name)
            silent = is_neutral(value) or written(value) == written(default)
            if silent or section in WORLD or key in WORLD or key in ("compute_environment", "distributed_type"):
                continue
            if not {key, name} & used_arguments or name.upper() in dropped:
                unused.append(section + "." + key if nested else key)
    return unused


def dropped_by_plugin(variables: dict[str, str]) -> set[str]:
    """Return the FSDP_ variables that Accelerate's plugin does not use: version 2 has no sharding strategy, for one."""
    if "ACCELERATE_USE_FSDP" not in variables:
        return set()
    from unittest import mock

    from accelerate.utils import FullyShardedDataParallelPlugin

    try:
        with mock.patch.object(os, "environ", Variables(os.environ, **variables)):
            FullyShardedDataParallelPlugin()
    except Exception:  # where there is no GPU, say; a rank prints its own traceback
        return set()
    return {name for name in variables if name.startswith("FSDP_")} - used_variables


if __name__ == "__main__":
    main(*sys.argv[1:])
