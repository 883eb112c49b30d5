"""What the words of a failure mean: rules from the messages of libraries, schedulers and clouds to classes.

A rule is a class and a regular expression; of several that match a line, the first in the table wins. They were written
from the libraries' own formats. Where a message fits two classes, there is no rule: no verdict is better than a wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

Rule = tuple[str, re.Pattern[str]]


class Class(NamedTuple):
    """What a class is: what happened, in words; what to change, "" for nothing; whether that changes what is learned."""

    what: str
    change: str = ""
    changes_results: bool = False


CLASSES = {
    "gpu-memory": Class(
        "the GPU's memory was full", "a smaller batch per device, with accumulation that keeps the global batch"
    ),
    "host-memory": Class("the machine's memory was full", "more memory per node, or fewer loader workers"),
    "shared-memory": Class("/dev/shm was too small for the loader's workers", "a larger /dev/shm, or num_workers=0"),  # noqa: S108
    "worker-killed": Class("a data loader's worker died", "fewer workers; more memory if they grow"),
    "unpicklable": Class(
        "something that had to travel to another process cannot be pickled",
        "move the function to the top level of a module",
    ),
    "collective-timeout": Class(
        "a collective operation ran into its timeout",
        "find the rank that did not arrive; a longer timeout if it was only slow",
    ),
    "cuda-error": Class(
        "a kernel or a library failed on the GPU", "run once with CUDA_LAUNCH_BLOCKING=1 to see the true place"
    ),
    "index-range": Class(
        "an id or label lies outside the table it looks up",
        "compare the largest id with the embedding's size, and the labels with num_labels",
        True,
    ),
    "gpu-hardware": Class("the GPU itself is ill", "the same job on another node"),
    "cuda-version": Class("driver, GPU and torch's CUDA do not fit", "an image whose CUDA fits the driver and the GPU"),
    "binary-mismatch": Class(
        "a compiled package does not fit this torch or system",
        "the wheel that was built for this torch and this system",
    ),
    "no-gpu": Class("a GPU was needed and cannot be used", "ask for accelerators, or run without CUDA and fp16"),
    "missing-module": Class("a Python module is not installed", "add the package to requirements.txt"),
    "wrong-version": Class(
        "a package is there in a version that does not fit", "pin the version that the code was written for"
    ),
    "requirements-conflict": Class(
        "a requirement does not exist, or the requirements exclude each other", "correct the name, or loosen the pins"
    ),
    "bad-argument": Class("an argument or option is unknown, missing or wrong", "correct the argument"),
    "parallel-config": Class(
        "batch sizes or strategy contradict the number of processes", "make the batch sizes fit the world size", True
    ),
    "missing-file": Class("a file is not where it is looked for", "correct the path, or name it as an input"),
    "permission": Class("a file may not be read, written or executed", "a folder that the job's user may write"),
    "disk-full": Class("the disk, or a quota of it, was full", "more disk_gb, or fewer checkpoints kept"),
    "nan-loss": Class(
        "loss, gradients or probabilities became NaN or infinite",
        "a lower learning rate, bf16 instead of fp16, gradient clipping",
        True,
    ),
    "spot-loss": Class("the platform took the machine or preempted the job", "retry from the last checkpoint"),
    "quota": Class(
        "the account, project or queue may not use so much", "ask for a higher quota, or another machine type"
    ),
    "capacity": Class("the platform has no such machine free", "another region, zone or machine type; retry"),
    "image-pull": Class(
        "the container image could not be fetched", "correct the image's name or the registry's credentials"
    ),
    "timeout": Class("the job's time was over", "a higher limits.max_runtime, and resume"),
    "stalled": Class(
        "nothing happened for longer than limits.stall allows",
        "see the stacks in the log for where the ranks wait; a longer limits.stall if they were only slow",
    ),
    "lost-node": Class("a node vanished", "retry from the last checkpoint"),
    "signal": Class("a process died of a signal, and nothing says why", "a core dump or faulthandler shows where"),
    "wrong-world": Class(
        "not as many processes, nodes or GPUs came together as were asked for",
        "let cloudtrain start the ranks; compare num_nodes and processes_per_node",
    ),
    "hub-access": Class("the Hugging Face Hub refused", "accept the licence and pass HF_TOKEN as a secret"),
    "network": Class("a host or service could not be reached", "open the network, or bring the files as inputs"),
    "store-access": Class("an object store or its credentials refused", "give the job's role access to the bucket"),
    "platform-access": Class("the platform refused the caller or the job's role", "grant the missing permission"),
    "bad-request": Class("the platform found the request itself invalid", "correct the field that it names"),
    "platform-fault": Class("the platform broke; nothing of the job's is to blame", "retry"),
    "missing-secret": Class(
        "a secret or login that the job needs is not there", "define the secret where the job runs"
    ),
    "port-in-use": Class("a port that the job wanted is taken", "another port, or end the other job"),
    "shape-mismatch": Class("the sizes of tensors do not fit"),
    "device-or-dtype": Class(
        "tensors lie on different devices or are of different types", "move both to one device and type"
    ),
    "checkpoint": Class(
        "a checkpoint is torn, unreadable or of another model",
        "the previous checkpoint, or the model it was written by",
        True,
    ),
    "model-config": Class(
        "a model's or tokenizer's configuration is missing, malformed or unknown",
        "the files of a complete model, and a library that knows it",
    ),
    "bad-data": Class("the data is not what was expected", "correct the data or the column's name", True),
    "ddp-misuse": Class(
        "the script broke a rule of distributed training",
        "find_unused_parameters=True, or the same calls on every rank",
    ),
    "toolchain": Class("a compiler or build tool is absent or failed", "an image with the compiler (a devel image)"),
    "syntax-error": Class("Python could not parse a file"),
    "script-error": Class("the script raised an error of its own"),
    "unknown": Class("neither the log nor the platform says why"),
}


def table_of(*pairs: tuple[str, str]) -> list[Rule]:
    return [(name, re.compile(pattern)) for name, pattern in pairs]


# What a scheduler, a kernel or a container engine writes beside the job; it decides wherever it stands.
PLATFORM = table_of(
    ("spot-loss", r"^(slurmstepd|srun|scancel).*DUE TO (PREEMPTION|JOB REQUEUE|NODE PREEMPTION)"),
    ("spot-loss", r"[Mm]etadata [Ss]ervice says (termination|preemption) is imminent"),
    ("timeout", r"^(slurmstepd|srun).*(DUE TO TIME LIMIT|CANCELLED.*TIME LIMIT)"),
    ("lost-node", r"^(slurmstepd|srun).*(DUE TO NODE (FAILURE|FAIL)|NODE_FAIL)|^srun: error: Node failure on"),
    ("platform-fault", r"^srun: error: (Task|Application) launch .*failed"),
    ("binary-mismatch", r"^exec \S+: exec format error$|^standard_init_linux\.go:\d+: .*exec format error"),
    (
        "host-memory",
        r"(?i)^slurmstepd: .*(oom[-_ ]kill|exceeded .*memory limit|out of memory)|^srun: error: .*: Out Of Memory",
    ),
    (
        "host-memory",
        r"(?i)\b(memory cgroup )?out of memory: kill(ed)? process|^Memory cgroup out of memory|OOMKilled\b",
    ),
    (
        "gpu-hardware",
        r"NVRM: Xid .*: (48|62|63|64|74|79|92|94|95|110|119|120|140)\b|NVRM: .*(fallen off the bus|GPU .* lost)",
    ),
)

# The sentences of our own launcher and trainer, which refuse with exit code 78 before anything is trained.
OURS = table_of(
    ("missing-secret", r"the secret \S+ was not found|the secret file|needs the secret"),
    (
        "wrong-world",
        r"(GPUs per node|nodes|processes) were asked for|nodes joined within|work together here"
        r"|would start \d+ processes|is not one of \d+ nodes",
    ),
    (
        "missing-file",
        r"the source has no |the input \S+ (does not exist|cannot be read)|the dataset \S+ does not exist"
        r"|is no file here|no input named|has no input",
    ),
    ("disk-full", r"the disk is full|are free on this node"),
    ("missing-module", r"is not installed|needs the package|on the node: pip install|needs DeepSpeed|needs fsspec"),
    ("wrong-version", r"or newer, here is|the manifest has version|was pickled by Python"),
    ("no-gpu", r"needs a GPU|there is no GPU|has no bfloat16"),
    (
        "parallel-config",
        r"parallelism\.|\b[tpc]p_size|strategy \w+|\bhsdp\b|pp_schedule|--global_batch|--per_device_train_batch_size"
        r"|data-parallel processes|pipeline stages|nothing splits the model",
    ),
    (
        "bad-data",
        r"nothing to train on|there is no text|is no conversation|has no labels|needs two labels|is not text"
        r"|held out only|samples are fewer",
    ),
    ("model-config", r"the tokenizer |the model .* cannot be made|chat template|no multiple of --num_attention_heads"),
    ("checkpoint", r"cannot go on from|reads its own layout only"),
)

# A platform's own sentence on the end of a run.
REASONS = table_of(
    ("stalled", r"limits\.stall"),
    (
        "store-access",
        r"(?i)(access ?denied|forbidden|not authorized|no access|unable to|permission|403|invalid|expired"
        r"|does not have).*(s3://|gs://|\bs3:|storage\.(objects|buckets)\.|(Get|Put|Head)Object|ListBucket"
        r"|ListObjects)|(?i:data download failed|(s3://|gs://|storage\.objects\.).*(access ?denied|forbidden"
        r"|not authorized|permission|does not have))|NoSuchBucket",
    ),
    (
        "image-pull",
        r"ImagePullBackOff|ErrImage|InvalidImageName|CannotPullContainer|(?i:failed to pull|pull access denied"
        r"|manifest (for .* )?(unknown|not found)|no basic auth credentials|unable to (pull|find) image"
        r"|error pulling image|cannot (pull|find) (the )?(image|repository)|image (uri )?.*(not found"
        r"|does not exist|cannot be pulled|could not be pulled|can't be pulled|is invalid or)"
        r"|repository .* not found|no matching manifest|does not have .*artifactregistry)",
    ),
    (
        "missing-secret",
        r"(?i)the secret \S+ was not found|CreateContainerConfigError.*secret|secret \"?\S+ not found"
        r"|couldn't find key \S+ in secret|Secrets Manager can't find|references non-existent secret",
    ),
    (
        "wrong-world",
        r"GPUs? per node (were|was) asked for|\d+ of \d+ nodes joined|would start \d+ processes, not|world size",
    ),
    (
        "timeout",
        r"(?i)max_?runtime|DeadlineExceeded|DEADLINE_EXCEEDED|longer than (the )?(specified|scheduling)? ?deadline"
        r"|DUE TO TIME LIMIT|exceeded (the |its )?(maximum|max|time) ?(run ?time|limit|duration|deadline)"
        r"|job timed? ?out\b|exceed(ed|s) (the )?timeout|time limit reached",
    ),
    ("host-memory", r"OOMKilled|low on resource: memory|(?i:out[-_ ]of[-_ ]memory|OutOfMemoryError|oom[-_]kill)"),
    (
        "disk-full",
        r"(?i)ephemeral[- ](local )?storage|no space left|DiskPressure|disk .*(full|exceeded)"
        r"|exceeds the .*volume size|not enough (disk|free) space",
    ),
    (
        "bad-request",
        r"admission webhook .* denied the request|ValidationException|(?i:INVALID_ARGUMENT|invalid ?argument)"
        r"|Requested (time limit|partition|.*) is invalid|(?i:sbatch: error: .*(invalid|unrecognized) )"
        r"|is invalid: (spec|metadata)|unknown field|strict decoding|BadRequest|(?i:unsupported value)"
        r"|InvalidParameter|(?i:invalid (generic|feature|qos|partition|account|job|trackable)\b.*specif)"
        r"|More processors requested than permitted|Memory specification can not be satisfied",
    ),
    (
        "quota",
        r"(?i)ResourceLimitExceeded|exceeded quota|quota ?(metric|exceed|limit|'|\.)|quotas? .*exceed"
        r"|insufficient .*quota|QOS(Max|Grp|Min|Usage)|Assoc(Grp|Max)|accounting/QOS policy|service limit"
        r"|QuotaExceeded|quota \S+ is (exceeded|exhausted)|exceeds .*quota|LimitExceeded",
    ),
    (
        "capacity",
        r"(?i)CapacityError|InsufficientCapacity|insufficient capacity|Resources are insufficient"
        r"|RESOURCE_POOL_EXHAUSTED|stockout|FailedScheduling|\d+/\d+ nodes are available|Insufficient (nvidia\.com"
        r"|cpu|memory|amd\.com)|Unschedulable|node configuration is not available|unable to provision"
        r"|ReqNodeNotAvail|Nodes required for job are DOWN|does not have enough resources"
        r"|enough resources available|sufficient \S+ capacity|not enough (capacity|resources)"
        r"|currently (unavailable|not available)"
        r"|no capacity|out of capacity|try a different (region|zone|accelerator)",
    ),
    (
        "spot-loss",
        r"(?i)(?<!No )\bpreempt(ed|ion(?! victims))|spot (instance|capacity|vm|node|interrupt|machine)"
        r"|interrupted by .*spot|reclaimed|requeued|TerminatedBySpot|instance .*terminated by the platform"
        r"|PreemptionByScheduler|left on request",
    ),
    (
        "lost-node",
        r"(?i)NODE_FAIL|NodeLost|NodeNotReady|NodeShutdown|node is shutting|node .*(is )?(unresponsive|was lost"
        r"|not ready|vanished|unreachable|failed)|(was|is) lost\b|heartbeat|connection .*(lost|gone)"
        r"|TerminationByNode|imminent node shutdown|NodeControllerEviction|host .*(unreachable|gone|vanished)"
        r"|node .* (was )?deleted|the guard was killed|DeletionByTaintManager|died without a last word"
        r"|machine .* (restarted|rebooted)|supervisor",
    ),
    (
        "platform-fault",
        r"(?i)internal ?(server )?error|ThrottlingException|throttl|rate exceeded|service ?unavailable"
        r"|backend error|\b50[0234]\b|UNAVAILABLE\b|socket timed out on send/recv"
        r"|unable to contact slurm controller|Slurm backup controller|etcdserver|FailedCreatePodSandBox"
        r"|pod sandbox|requeued held|launch failed|Prolog|JobHeldAdmin|unexpected (server|system) error"
        r"|platform error|an internal",
    ),
    (
        "platform-access",
        r"AccessDenied|(?i:not authorized to perform|PERMISSION_DENIED|permission '?\S+'? denied|actAs"
        r"|is forbidden: User|cannot create resource|Unauthorized|could not assume role|UnrecognizedClient"
        r"|InvalidClientToken|ExpiredToken|access/permission denied|(user|user's group) not permitted"
        r"|does not have .*permission|security token .* (invalid|expired)|not have access)",
    ),
    (
        "missing-file",
        r"the source has no file|(?i:the input \S+ .*(not|no)\b|No such file or directory|(script|file"
        r"|entry ?point) .*(does not exist|not found))|no such (input|object|key)|NoSuchKey",
    ),
    ("parallel-config", r"parallelism\.\w+ is \d+|nothing splits the model"),
    ("permission", r"Permission denied"),
    (
        "no-gpu",
        r"(?i)no (CUDA|GPU)s? .*(found|available)|could not select device driver"
        r"|nvidia-container-cli: initialization error",
    ),
    ("cuda-version", r"unsatisfied condition: cuda"),
)

# Python's own words for a bug; only where the script itself was executing.
BUGS = re.compile(
    r"^(NameError|UnboundLocalError|ZeroDivisionError|RecursionError|NotImplementedError)\b"
    r"|'NoneType' object|list index out of range"
    r"|object is not (callable|iterable|subscriptable)|unsupported operand type"
    r"|not enough values to unpack|too many values to unpack"
    r"|string indices must be|(list|tuple) indices must be|tuple index out of range"
    r"|object has no attribute|circular import"
    r"|can only concatenate|takes \d+ positional arguments? but|division by zero|pop from empty"
    r"|missing \d+ required positional"
)
# What the system or a library in C raises through a script's line: where no rule knows the words, the script is not the cause.
ELSEWHERE = re.compile(
    r"^(RuntimeError|OSError|IOError|EnvironmentError|SystemError|MemoryError|BufferError|EOFError|TimeoutError"
    r"|InterruptedError|(Connection\w*|BrokenPipe|ChildProcess|ProcessLookup|FileNotFound|IsADirectory"
    r"|NotADirectory|Permission|Blocking\w*|Unicode\w*|Import|ModuleNotFound)Error|Exception|Warning"
    r"|(torch|c10|cupy|triton|jax|_pickle|pickle)\b[\w.]*)(:|$)"
)
# What a rank says because another one has died, or because it was asked to leave.
CONSEQUENCES = re.compile(
    r"Connection (closed|reset) by|connection (was )?(closed|reset)|ncclRemoteError|remote process exited"
    r"|Broken ?[Pp]ipe|ConnectionReset|NCCL communicator was aborted"
    r"|KeyboardInterrupt|SignalException|ChildFailedError|recvValue failed|sendBytes failed|Got 0 bytes"
    r"|failed to recv|ProcessGroup\w* .*(abort|shutdown|destroy)"
    r"|Connection aborted|heartbeat monitor|unhandled system error|NCCL error in: .*(remote process"
    r"|unhandled)|IncompleteRead|peer closed|socket closed"
    r"|process group .*(was )?destroyed|ProcessExitedException|CalledProcessError"
    r"|DistBackendError: .*store->get(?!.*(Socket Timeout|wait timeout))"
)
# Classes that a more special cause hides under when its message is not known: of those the verdict says "probably". Found by
# leaving each known failure's message out of the rules and looking at what was said then (tests/diagnosis/README.md).
GENERAL = frozenset(
    [
        "signal",
        "cuda-error",
        "worker-killed",
        "collective-timeout",
        "shape-mismatch",
        "bad-data",
        "wrong-version",
        "platform-access",
        "spot-loss",
        "script-error",
    ]
)
# What is worth a try where a signal came from outside: no dump is left of such a process.
SENT = {
    "SIGKILL": "look at the machine's memory: the kernel kills so where it ran out; else somebody did",
    "SIGTERM": "look for who asked it to end: a scheduler, a limit of the platform, a person",
    "SIGINT": "look for who asked it to end: Ctrl-C, or a program that sends the same",
    "SIGHUP": "look for who asked it to end: its terminal or connection was closed",
    "SIGPIPE": "look at what it wrote to: the reader was gone",
    "SIGUSR1": "look for who sent it: some schedulers warn so of the end",
    "SIGUSR2": "look for who sent it: some schedulers warn so of the end",
    "SIGALRM": "look for a timer in the script, or in what it runs",
}
LATE = frozenset({"collective-timeout", "signal"})  # what other ranks die of, long after the cause
# In a chain of tracebacks these are often survived: what was raised last outweighs them.
WEAK = frozenset(
    [
        "missing-module",
        "missing-file",
        "bad-data",
        "bad-argument",
        "wrong-version",
        "hub-access",
        "permission",
        "missing-secret",
    ]
)
# A generic error, which a line beside it explains.
VAGUE = re.compile(
    r"CUDA error: (device-side assert|unknown error|initialization error)|NCCL error in: .*(internal error"
    r"|invalid usage|unhandled)|cuda runtime error \((59|710|30|999)\)"
    r"|^OSError: (Forbidden|Not Found)|DistBackendError"
)


def first_match(rules: Sequence[Rule], text: str) -> str | None:
    """Return the class of the first rule that matches, or None."""
    return next((name for name, pattern in rules if pattern.search(text)), None)
