"""The sentences that prove a cause (verdictproof.py): whole, as one library, scheduler or platform writes them.

A row is a class and the wordings of one sentence. It stands here only where evidence bears it out: two independent failures of
the corpus are decided by it with the right class, each wording by one, and it decides none of another class. A test counts
(tests/verdicts/test_sentences.py). What is not here is found all the same, and said with "probably".
"""

from __future__ import annotations

import re

from cloudtrain.verdictrules import Rule


def _rows(*rows: tuple[str, ...]) -> list[Rule]:
    return [(label, re.compile("|".join(wordings))) for label, *wordings in rows]


# The last line of a traceback from the type on, or of a program that has none.
SENTENCES = _rows(
    ("unpicklable", r"^(AttributeError|_pickle\.PicklingError): Can't (pickle|get) local object '?[\w.<>]+"),
    (
        "index-range",
        r"^IndexError: index out of range in self$",
        r"^IndexError: Target -?\d+ is out of bounds\.$",
    ),
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
    (
        "port-in-use",
        r"^(RuntimeError|torch\.distributed\.DistNetworkError): The server socket has failed to listen on any local network"
        r" address\..*(EADDRINUSE|Address already in use)",
    ),
    (
        "ddp-misuse",
        r"^RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one\.",
        r"^RuntimeError: Expected to mark a variable ready only once\.",
        r"^RuntimeError: Detected mismatch between collectives on ranks\. Rank \d+ is running",
        r"^RuntimeError: (DDP expects same model|\[\d+\]: params\[\d+\] in this process with sizes)",
    ),
    (
        "checkpoint",
        r"^(safetensors\.\w+\.|safetensors_rust\.)SafetensorError: Error while deserializing header: ",
    ),
    ("hub-access", r"^huggingface_hub\.(errors|utils\._errors)\.GatedRepoError: 40[13] Client Error\b"),
    (
        "store-access",
        r"^botocore\.\w+\.\w+: An error occurred \((AccessDenied|403|ExpiredToken|InvalidAccessKeyId|SignatureDoesNotMatch)\)"
        r" when calling the (Get|Put|Head|List|Copy|Delete|Create|Upload|Complete)\w*(Object|Bucket|Part|MultipartUpload)\w*"
        r" operation",
    ),
    ("toolchain", r"^\s*([\w.]+\.)?(MissingCUDAException|AssertionError): CUDA_HOME does not exist, unable"),
    (
        "requirements-conflict",
        r"^ERROR: Cannot install .+ because these package versions have conflicting dependencies\.$",
        r"^ERROR: No matching d",
    ),
    (
        "binary-mismatch",
        r"^ImportError: \S+: undefined symbol: \w+",
        r"^ImportError: \S+: version `(GLIBC|GLIBCXX|CXXABI)_[\d.]+' not found \(required by .+\)",
    ),
    (
        "parallel-config",
        r"^AssertionError: Check batch related parameters\. train_batch_size is not equal to micro_batch_per_gpu"
        r" \* gradient_acc_step",
        r"^AssertionError: Micro batch size per gpu: \d+ has to be greater than 0",
    ),
    (
        "device-or-dtype",
        r"^RuntimeError: Expected all tensors to be on the same device, but found at least two devices, (?!cuda:\d+ and cuda:)",
        r"^RuntimeError: mat1 and mat2 must have the same dtype, but got \w+ and \w+$",
        r"^RuntimeError: expected (scalar type|target dtype to be) .+ but (found|got) \w+$",
    ),
    (
        "bad-argument",
        r"^[\w./ -]+: error: the following arguments are required: (?!.*(rank|world|master))",
        r"^[\w./ -]+: error: unrecognized arguments: (?!.*--local[-_]rank)",
    ),
    (
        "nan-loss",
        r"^Exception: Current loss scale already at minimum - cannot decrease scale anymore\. Exiting run\.$",
    ),
)

# What the system and its schedulers write beside the job.
BESIDE = _rows(
    ("host-memory", r"^slurmstepd: error: Detected \d+ oom[-_ ]kill event"),
    ("timeout", r"^slurmstepd: .*\*\*\* (JOB|STEP) \S+ .*DUE TO TIME LIMIT"),
)

# A platform's own word for the end: a code of its own, not a word that may stand anywhere.
CODES = _rows(
    ("quota", r"\(ResourceLimitExceeded\) when calling"),
    (
        "lost-node",
        r"^(?!.*([Ss]pot|[Pp]reempt)).*\bNODE_FAIL\b",
        r"^(?!.*([Ss]pot|[Pp]reempt)).*\bNodeLost: Node \S+ which was running pod",
    ),
)
