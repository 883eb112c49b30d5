"""Compare the nodes and processes in a command of torchrun or accelerate launch with the job's nodes and GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

_COMMAND = re.compile(r"(?<![\w./-])(torchrun|torch\.distributed\.run|accelerate launch)(?![\w-])((?:\\\n|[^\n;&|])*)")
# Types of an Accelerate file for which it starts several processes without telling them that they run on CPU
# (accelerate 1.15: commands/launch.py, launch_command; state.py, PartialState._prepare_backend).
_ON_GPUS = ("FSDP", "MULTI_GPU")
_OPTIONS = {"accelerate launch": "--num_machines"}


def nodes_note(command: str, nodes: int, *, is_text: bool) -> str:
    """Return a note where a launcher in a command expects other nodes than the job has; "" where it does not.

    Args:
        command: text of a shell, or a command's words joined by spaces.
        nodes: of the job.
        is_text: whether a shell reads the command and replaces its variables.
    """
    for launcher, words in _COMMAND.findall(command):
        option = _OPTIONS.get(launcher, "--nnodes")
        if launcher == "accelerate launch" and "--config_file" in words:
            continue  # the file may have it
        found = re.search(rf"{option.replace('_', '[-_]')}[=\s]+[\"']?([^\s\"']+)", words)
        if found is None and nodes > 1:
            return (
                f"{launcher} without {option}: each of the {nodes} nodes trains by itself. Name the script alone, or give"
                f" it the addresses{'' if is_text else ' in a run: text'}"
                " ($CLOUDTRAIN_NUM_NODES, $CLOUDTRAIN_NODE_RANK, $MASTER_ADDR)"
            )
        number = re.fullmatch(r"(?:(\d+):)?(\d+)", found[1]) if found else None
        if number and not int(number[1] or number[2]) <= nodes <= int(number[2]):
            return f"{launcher} {option} {found[1] if found else ''} waits for other nodes than num_nodes, {nodes}:" + (
                f" write {option} $CLOUDTRAIN_NUM_NODES, or change num_nodes"
                if is_text
                else f" name the script alone with --nodes {number[2]} (cloudtrain starts the ranks), or change {option}"
            )
    return ""


def gpus_note(command: str, gpus: int, nodes: int) -> str:
    """Return a note where a launcher in a command starts fewer processes than a node has GPUs; "" where it does not.

    Args:
        command: text of a shell, or a command's words joined by spaces.
        gpus: of each node.
        nodes: of the job.
    """
    for launcher, words in _COMMAND.findall(command):
        total = launcher == "accelerate launch"  # --num_processes counts those of all nodes
        option = "--num_processes" if total else "--nproc_per_node"
        found = re.search(rf"{option.replace('_', '[-_]')}[=\s]+[\"']?([^\s\"']+)", words)
        if found is None and total:
            continue  # accelerate starts one for each GPU
        if found and not found[1].isdigit():
            continue  # auto, gpu or a variable
        each = int(found[1]) // (nodes if total else 1) if found else 1
        if each < gpus:
            most = gpus * nodes if total else gpus
            given = f"{option} {found[1]}" if found else f"without {option}"
            return (
                f"{launcher} {given} uses {each} of the {gpus} GPUs of a node, and {gpus - each} paid GPUs are idle:"
                f" write {option} {most}, or ask for fewer GPUs (resources.accelerators)"
            )
    return ""


def cpu_note(command: str, read: Callable[[str], Mapping[str, Any]]) -> str:
    """Return a note where accelerate launch in a command would start separate trainings on CPU; "" where it would not.

    Args:
        command: text of a shell, or a command's words joined by spaces.
        read: returns what the Accelerate file of this path holds; empty where it cannot be read.
    """
    for launcher, words in _COMMAND.findall(command):
        if launcher != "accelerate launch" or re.search(r"--cpu\b", words) or "ACCELERATE_USE_CPU" in command:
            continue
        found = re.search(r"--config[-_]file[=\s]+[\"']?([^\s\"']+)", words)
        config = read(found[1]) if found else {}
        multi_gpu = re.search(r"--multi[-_]gpu\b", words)
        if not multi_gpu and config.get("distributed_type") not in _ON_GPUS:
            continue
        number = re.search(r"--num[-_]processes[=\s]+[\"']?([^\s\"']+)", words)
        count = number[1] if number else str(config.get("num_processes", ""))
        if count.isdigit() and int(count) > 1:
            why = "--multi_gpu" if multi_gpu or not found else f"{found[1]} of type {config['distributed_type']}"
            return (
                f"accelerate launch with {why}: on a machine without GPUs its {count} processes do not know each other and"
                " each trains by itself. Name the script alone with --processes, or add --env ACCELERATE_USE_CPU=true"
            )
    return ""
