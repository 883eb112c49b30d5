"""Write the batch script of a Slurm job: one task a node, the launcher, which finds its place from SLURM_*.

The script outlives the tasks: when they have left on request because Slurm preempts the job, or have ended because a
node was lost, it requeues the job itself, since Slurm records a job that ends within the grace time as failed and
forgets it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.slurm.slices import Slices
from cloudtrain.events import UNFIT
from cloudtrain.nodes import paths

STRAGGLER_S = 120  # how long tasks may run after the first one has ended

_SCRIPT = r"""#!/bin/bash -l
# {attempt_id}: written by cloudtrain; sbatch's arguments stand in the plan.
cd {folder} || exit 1
umask {umask}
chmod {output_mode} slurm.out
id=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}} id=${{id:-$SLURM_JOB_ID}}
ln -s "$id" owner 2>/dev/null || [ "$(readlink owner)" = "$id" ] || exit 0 # sent twice
printf %s "$id" >job.$id && mv job.$id job
started=${{SLURM_JOB_START_TIME:-$(date +%s)}} # what Slurm counts from
[ -e begun ] || printf %s "$started" >begun
restart=${{SLURM_RESTART_COUNT:-0}}
over=0 # how many restarts followed the end of a slice
{slice_begins}say() {{ printf '%s %s %s %s\n' "$1" "$restart" "$2" "$3" >state.half && mv state.half state; }}
phase() {{ scontrol show job -o "$id" 2>/dev/null | sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p;q'; }}
avoid() {{ # a node that failed the health check, beside those that are excluded already
  local bad all
  bad=$(sed -n 's/.*"reason": "node [0-9]* (\([[:alnum:]._-]*\)) {unfit}.*/\1/p' node-0/status.json 2>&-)
  [ "$bad" ] || return
  all=$(scontrol show job -o "$id" | sed -n 's/.* ExcNodeList=\([^ (][^ ]*\).*/\1,/p;q')
  scontrol update JobId="$id" ExcNodeList="$all$bad"
}}
trap : TERM # Slurm signals the tasks too: they save and leave, this script sees to the rest
if [ -e cancel ] || [ -e stop ]; then say ENDED 75 stopped; exit 75; fi
if [ $((restart - over)) -gt {restarts} ]; then say ENDED 75 restarts; exit 75; fi
for old in node-*/status.json; do # of the start before: it must not speak for this one
  [ -e "$old" ] && mv "$old" "$old.$((restart - 1))"
done
for ((rank = 0; rank < {nodes}; rank++)); do mkdir -p node-$rank; done
[ -s token ] || (umask 077 && printf '{{"token": "%s"}}' "$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')" >token)
say STARTED - {launchers}
numbered() {{ # what setup lines and srun print, as lines of a node's log
  trap '' TERM
  local seq line now day
  seq=$(grep -c '^[0-9]* -1 ' slurm.out)
  while IFS= read -r line || [ -n "$line" ]; do
    case $line in # what the launcher says, and what --cpu-bind=none means where there is no task plugin
    "srun: error: "*": Exited with exit code "* | "srun: cluster configuration lacks support for cpu binding") continue ;;
    esac
    now=${{EPOCHREALTIME:-$(date +%s.000000)}}
    TZ=UTC printf -v day '%(%Y-%m-%dT%H:%M:%S)T' "${{now%[.,]*}}"
    printf '%s -1 %s.%sZ %s\n' $((seq++)) "$day" "${{now#*[.,]}}" "$line"
  done
}}
exec 3>&1 > >(numbered) 2>&1
reader=$!
settle() {{ # wait for the last line; what a setup line left running may print on
  exec >&3 2>&1
  for _ in {{1..20}}; do kill -0 "$reader" 2>/dev/null || break; sleep 0.1; done
}}
{setup}export SLURM_EXPORT_ENV=ALL
{exports}cd source || exit 1
{launch}
code=$?
cd ..
settle
states='{again}' next=again
[ $((restart - over)) -lt {restarts} ] || next=
{slice_ends}if [ "$next" ] && grep -qsE "\"state\": \"($states)\"" node-*/status.json && [ ! -e cancel ] && [ ! -e stop ] &&
  [ "$(phase)" = RUNNING ]; then # not after scancel or at the time limit
  say REQUEUED "$code" "$next"
  avoid
  scontrol requeue "$id" && sleep 600 # Slurm ends this script
fi
say ENDED "$code" "$(phase)"
exit "$code"
"""

_STEP = r"""--nodes={nodes} --ntasks={tasks} --ntasks-per-node={each} \
  {cpus} --export=ALL --mpi=none --cpu-bind=none \
  --kill-on-bad-exit=0 --wait={wait} --job-name=launch {srun_args}\
"""
_TASK = r"""  bash -c 'export CLOUDTRAIN_NODE_DIR={quoted_folder}/node-${rank}; exec "$@" <{quoted_folder}/token' \
  launch {command}"""
_CPUS = '${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"}'
# A body of sbatch: one launcher, here, and no step of srun around it, so that the body's own steps have all nodes.
_BODY = r"""export SLURM_SUBMIT_DIR="$PWD"
CLOUDTRAIN_NUM_NODES=1 CLOUDTRAIN_NODE_DIR={folder}/node-0 {command} <{folder}/token &
launcher=$! signalled=
{trap}while wait "$launcher"; code=$?; [ "$signalled" ]; do signalled=; done
(exit "$code")"""
_TRAP = """trap 'signalled=1; pkill -{signal} -o -f {attempt}/node-0/slurm_script' {signal}
"""


def _body_trap(folder: str, options: Mapping[str, Any]) -> str:
    """Return the lines that pass a signal of --signal=B: to the body, which Slurm sends to the batch script alone."""
    found = (re.fullmatch(r"--signal=R?B:(?:SIG)?(\w+)@\d+", text) for text in options.get("directives", ()))
    return "".join(_TRAP.format(signal=each[1], attempt="/".join(folder.split("/")[-2:])) for each in found if each)


def environment_lines(options: Mapping[str, Any]) -> list[str]:
    """Return the shell lines that load the options' modules and conda environment."""
    lines = [f"module load {' '.join(map(shlex.quote, options['modules']))}"] if options.get("modules") else []
    if options.get("conda"):
        lines.append(f'eval "$(conda shell.bash hook)" && conda activate {shlex.quote(options["conda"])}')
    return lines


def python_command(options: Mapping[str, Any], words: Sequence[str], gpus: bool) -> list[str]:
    """Return the command that runs Python on a node as the launcher is run: in the image, where the options name one."""
    command = [str(options.get("python") or "python3"), *words]
    if not options.get("apptainer"):
        return command
    binds = [f"--bind={path}" for path in (options["folder"], *options.get("binds", ()))]
    return ["apptainer", "exec", *(["--nv"] if gpus else []), *binds, str(options["apptainer"]), *command]


def batch_script(
    attempt_id: str,
    folder: str,
    env: Mapping[str, str],
    manifest: Manifest,
    restarts: int,
    events: Sequence[str],
    options: Mapping[str, Any],
    slices: Slices | None = None,
    parts: Sequence[tuple[int, int, int | None]] = (),
) -> str:
    """Return the batch script.

    Args:
        restarts: how often Slurm may start the job again, after `events` as in retry.
        parts: nodes, launchers on each and CPUs of each launcher, of the components of a job whose nodes are not all alike.
    """
    lines = [*environment_lines(options), *options.get("setup", ())]
    setup = "".join(
        f"{{ {line}\n}} || {{ echo {shlex.quote(f'this setup line failed: {line}')}; settle; say ENDED 78 setup; exit 78; }}\n"
        for line in lines
    )
    is_body = manifest.compat == "sbatch"
    step = {
        "wait": manifest.grace_s + STRAGGLER_S,
        "srun_args": "".join(f"{shlex.quote(text)} " for text in options.get("srun_args", ())),
    }
    all_nodes = '"$SLURM_JOB_NUM_NODES"'
    steps = [
        _STEP.format(
            nodes=nodes,
            tasks=nodes * each,
            each=f"{each} --distribution=cyclic" if each > 1 else each,
            cpus=f"--cpus-per-task={cpus}" if cpus else "",
            **step,
        )
        for nodes, each, cpus in parts
    ] or [_STEP.format(nodes=all_nodes, tasks=all_nodes, each=1, cpus=_CPUS, **step)]
    if any(each > 1 for _, each, _ in parts):
        env = {**env, "CLOUDTRAIN_LAUNCHERS": ",".join(str(each) for _, each, _ in parts)}
    gpus = manifest.gpus_per_node or any(role.get("gpus_per_node") for role in manifest.roles)
    launch = (_BODY if is_body else _TASK).format(
        folder=shlex.quote(folder),
        rank="SLURM_PROCID" if parts else "SLURM_NODEID",
        # within '...' of bash -c
        quoted_folder=shlex.quote(folder).replace("'", "'\\''"),
        command=shlex.join(python_command(options, [".cloudtrain/launch.py"], bool(gpus))),
        trap=_body_trap(folder, options) if is_body else "",
    )
    if not is_body:
        launch = "srun " + "  : ".join(steps) + launch
    return _SCRIPT.format(
        attempt_id=attempt_id,
        unfit=UNFIT,
        folder=shlex.quote(folder),
        launchers="1" if is_body else manifest.nodes if parts else '"$SLURM_JOB_NUM_NODES"',
        nodes=manifest.nodes if parts else "SLURM_JOB_NUM_NODES",
        launch=launch,
        umask=env["CLOUDTRAIN_UMASK"],
        output_mode=f"{paths.folder_mode(env['CLOUDTRAIN_UMASK']) & 0o666:o}",
        restarts=restarts,
        again="|".join(name.upper() for name in events),
        slice_begins=slices.begins() if slices else "",
        slice_ends=slices.ends() if slices else "",
        setup=setup,
        exports="".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items()),
    )
