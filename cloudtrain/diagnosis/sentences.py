"""The sentences that prove a cause (certainty.py): whole, as one library, scheduler or platform writes them.

A row is a class and the wordings of its sentences. One stands here where a failure of the corpus was decided by it, with the
right class, and two readers of every failure that it decides saw that class and no other that could be defended; a test holds
it to that (tests/diagnosis/test_sentences.py). What is not here is found all the same, and said with "probably".
"""

from __future__ import annotations

import re

from cloudtrain.diagnosis.rules import Rule


def _rows(*rows: tuple[str, ...]) -> list[Rule]:
    return [(label, re.compile("|".join(wordings))) for label, *wordings in rows]


# The last line of a traceback from the type on, or of a program that has none.
SENTENCES = _rows(
    (
        "gpu-memory",
        r"^(torch\.(cuda\.)?OutOfMemoryError|RuntimeError): CUDA out of memory\. Tried to allocate [\d.]+ [KMG]iB\b",
    ),
    (
        "host-memory",
        r"^(numpy\.[\w.]+\._Array)?MemoryError: Unable to allocate [\d.]+ [KMGT]iB for an array with shape",
        r"^RuntimeError: (?!.*allocate \d{14,} bytes)\[enforce fail at \w*[Aa]lloc\w*\.cpp:\d+\] "
        r".*DefaultCPUAllocator: can't allocate memory: you",
    ),
    (
        "unpicklable",
        r"^(AttributeError|_pickle\.PicklingError): Can't (pickle|get) local object '?[\w.<>]+",
        r"^TypeError: cannot pickle '[\w.]+' object$",
    ),
    (
        "index-range",
        r"^IndexError: index out of range in self$",
        r"^IndexError: Target -?\d+ is out of bounds\.$",
        r"\.cu:\d+: .*block: \[\d+,\d+,\d+\], thread: \[\d+,\d+,\d+\] Assertion .* failed\.?$",
    ),
    ("gpu-hardware", r"^RuntimeError: CUDA error: uncorrectable ECC error encountered$"),
    (
        "cuda-version",
        r"^RuntimeError: The NVIDIA driver on your system is too old \(found version \d+\)",
        r"^RuntimeError: CUDA error: no kernel image is available for execution on the device$",
    ),
    (
        "no-gpu",
        r"^RuntimeError: Found no NVIDIA driver on your system\.",
        r"^RuntimeError: No CUDA GPUs are available$",
    ),
    ("wrong-world", r"^Duplicate GPU detected : rank \d+ and rank \d+ both"),
    (
        "port-in-use",
        r"^OSError: \[Errno 98\] Address already in use$",
        r"^(RuntimeError|torch\.distributed\.DistNetworkError): The server socket has failed to listen on any local network"
        r" address\..*(EADDRINUSE|Address already in use)",
    ),
    (
        "ddp-misuse",
        r"^RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one\.",
        r"^RuntimeError: Expected to mark a variable ready only once\.",
        r"^RuntimeError: Detected mismatch between collectives on ranks\. Rank \d+ is running",
    ),
    (
        "checkpoint",
        r"^RuntimeError: PytorchStreamReader failed reading zip archive:",
        r"^(safetensors\.\w+\.|safetensors_rust\.)SafetensorError: Error while deserializing header: ",
    ),
    ("model-config", r"^OSError: It looks like the config file at '.+' is not a valid JSON file\.$"),
    (
        "hub-access",
        r"^(requests\.exceptions|huggingface_hub\.\w+)\.\w*HTTPError: 429 Client Error: Too Many Requests for url:"
        r" https://huggingface\.co/",
    ),
    ("missing-secret", r"^KeyError: '(\w*_)?(TOKEN|API_?KEY|SECRET|PASSWORD|ACCESS_KEY)'$"),
    (
        "network",
        r"^(requests|urllib3)\.exceptions\.\w+: .*HTTPS?ConnectionPool\(host='[^']+', port=\d+\): Max retries exceeded"
        r" with url: .*NewConnectionError",
    ),
    (
        "toolchain",
        r"InvalidCxxCompiler: No working C\+\+ compiler found in ",
        r"^RuntimeError: Failed to find C compiler\. Please specify via CC environment",
    ),
    (
        "requirements-conflict",
        r"^ERROR: Cannot install .+ because these package versions have conflicting dependencies\.$",
        r"^ERROR: No matching d",
    ),
    (
        "binary-mismatch",
        r"^ImportError: \S+: version `(GLIBC|GLIBCXX|CXXABI)_[\d.]+' not found \(required by .+\)",
    ),
    ("missing-module", r"^ModuleNotFoundError: No module named '[a-zA-Z]\w*'$"),
    (
        "device-or-dtype",
        r"^RuntimeError: Expected all tensors to be on the same device, but found at least two devices, (?!cuda:\d+ and cuda:)",
        r"^RuntimeError: mat1 and mat2 must have the same dtype, but got \w+ and \w+$",
        r"^RuntimeError: expected target dtype to be .+ but (found|got) \w+$",
    ),
    (
        "bad-argument",
        r"^[\w./ -]+: error: the following arguments are required: (?!.*(rank|world|master))",
        r"^[\w./ -]+: error: unrecognized arguments: (?!.*--local[-_]rank)",
        r"^Error: No such option:? ",
        r"^ValueError: Some specified arguments are not used by the HfArgumentParser: \[",
    ),
    (
        "disk-full",
        r"^OSError: \[Errno 28\] No space left on device(: '.+')?$",
        r"^OSError: \[Errno 122\] Disk quota exceeded(: '.+')?$",
    ),
    (
        "permission",
        r"^PermissionError: \[Errno 13\] Permission denied: '.+'$",
        r"^\S+: line \d+: \S+: Permission denied$",
    ),
    (
        "missing-file",
        r"^FileNotFoundError: \[Errno 2\] No such file or directory: '.+'$",
        r"^FileNotFoundError: Unable to find '.+'$",
    ),
    (
        "nan-loss",
        r"^RuntimeError: Function '\w+' returned nan values in its \d+th output\.$",
        r"^Exception: Current loss scale already at minimum - cannot decrease scale anymore\. Exiting run\.$",
        r"^RuntimeError: probability tensor contains either `inf`, `nan` or element < 0$",
        r"^Loss is nan, stopping training$",
    ),
    ("syntax-error", r"^SyntaxError: '[(\[{]' was never closed"),
)

# What the system and its schedulers write beside the job.
BESIDE = _rows(
    (
        "host-memory",
        r"^slurmstepd: error: Detected \d+ oom[-_ ]kill event",
        r"\b[Oo]ut of memory: Killed process \d+ \((python[\d.]*|pt_\w+|torchrun|train\w*)\)",
    ),
    ("gpu-hardware", r"NVRM: Xid \(PCI:[\w:.]+\): 79, "),
    ("spot-loss", r"^slurmstepd: .*\*\*\* (JOB|STEP) \S+ .*DUE TO PREEMPTION"),
)

# A platform's or our launcher's own word for the end: a code or a sentence of its own, not a word that may stand anywhere.
CODES = _rows(
    ("missing-secret", r"^the secret \S+ was not found"),
    ("missing-file", r"^the source has no file "),
    ("disk-full", r"The node was low on resource: ephemeral-storage"),
    (
        "timeout",
        r"^max_runtime \(",
        r"(?<!code = )\bDeadlineExceeded\b",
        r"\bMaxRuntimeExceeded\b",
    ),
    (
        "host-memory",
        r"\bOOMKilled\b",
        r"The node was low on resource: memory\b",
        r"^The replica \S+ ran out-of-memory and exited with a non-zero status of 9\(SIGKILL\)",
    ),
    (
        "quota",
        r"\(ResourceLimitExceeded\) when calling",
        r": exceeded quota: \S+, requested: ",
        r"\bQOSMax(?!Wall)\w+",
        r"The following quota metrics exceed quota limits: ",
    ),
    (
        "capacity",
        r"^CapacityError: ",
        r"^Resources are insufficient in region: ",
        r"\bInsufficientInstanceCapacity\b",
    ),
    (
        "lost-node",
        r"^(?!.*([Ss]pot|[Pp]reempt)).*\bNODE_FAIL\b",
        r"^(?!.*([Ss]pot|[Pp]reempt)).*\bNodeLost: Node \S+ which was running pod",
    ),
)

# What a reason says where a state alone is no proof: a job is requeued, and waits too long, for several causes.
STATES = _rows(("timeout", r"(?i)max_?run_?time"), ("spot-loss", r"(?i)preempt"))
