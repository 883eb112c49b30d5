"""The sentences that prove a cause (verdictproof.py): whole, as one library, scheduler or platform writes them."""

from __future__ import annotations

import re

from cloudtrain.verdictrules import table_of

# Whole sentences of one library, from the type on. A class that is not here is never certain: its words tell what broke, not why.
SENTENCES = table_of(
    (
        "gpu-memory",
        r"^(torch\.(cuda\.)?OutOfMemoryError|RuntimeError): (CUDA"
        r"|HIP) out of memory\. Tried to allocate [\d.]+ [KMG]iB\b",
    ),
    (
        "host-memory",
        r"^(numpy\.[\w.]+\.)?(_ArrayMemoryError"
        r"|MemoryError): Unable to allocate [\d.]+ [KMGT]iB for an array with shape"
        r"|^RuntimeError: (?!.*allocate \d{14,} bytes)\[enforce fail at \w*[Aa]lloc\w*\.cpp:\d+\] "
        r".*DefaultCPUAllocator: (can't allocate"
        r"|not enough) memory: you"
        r"|^(OSError|BlockingIOError): \[Errno 12\] Cannot allocate memory$"
        r"|^pyarrow\.lib\.ArrowMemoryError: (malloc|realloc) of size \d+ failed$",
    ),
    (
        "unpicklable",
        r"^(AttributeError|_pickle\.PicklingError): Can't (pickle|get) local object '?[\w.<>]+"
        r"|^TypeError: cannot pickle '[\w.]+' object$|^_pickle\.PicklingError: Can't pickle <.+>: ",
    ),
    (
        "index-range",
        r"^IndexError: (index out of range in self|Target -?\d+ is out of bounds\.)$"
        r"|\.cu:\d+: .*block: \[\d+,\d+,\d+\], thread: \[\d+,\d+,\d+\] Assertion .* failed\.?$",
    ),
    ("gpu-hardware", r"^RuntimeError: CUDA error: uncorrectable ECC error encountered$"),
    (
        "cuda-version",
        r"^RuntimeError: (The NVIDIA driver on your system is too old \(found version \d+\)"
        r"|CUDA error: (no kernel image is available for execution on the device$"
        r"|the provided PTX was compiled with an unsupported))",
    ),
    (
        "no-gpu",
        r"^AssertionError: Torch not compiled with CUDA enabled$"
        r"|^RuntimeError: (Found no NVIDIA driver on your system\.|No CUDA GPUs are"
        r" available$)"
        r"|^AttributeError: module 'torch\._C' has no attribute '_cuda_setDevice'$",
    ),
    (
        "wrong-world",
        r"NCCL WARN Duplicate GPU detected : rank \d+ and rank \d+ both on CUDA device"
        r"|^Duplicate GPU detected : rank \d+ and rank \d+ both",
    ),
    (
        "port-in-use",
        r"^OSError: \[Errno 98\] (Address already in use"
        r"|error while attempting to bind on address .*: address already in use)$"
        r"|^(RuntimeError"
        r"|torch\.distributed\.DistNetworkError): The server socket has failed to listen on any local network"
        r" address\."
        r".*(EADDRINUSE|Address already in use)",
    ),
    (
        "ddp-misuse",
        r"^RuntimeError: (Expected to have finished reduction in the prior iteration before starting a new one\."
        r"|Expected to mark a variable ready only once\."
        r"|Detected mismatch between collectives on ranks\. Rank \d+ is running"
        r"|(DDP expects same model|\[\d+\]: params\[\d+\] in this process with sizes))",
    ),
    (
        "checkpoint",
        r"^RuntimeError: (Error\(s\) in loading state_dict for \w+:$|PytorchStreamReader failed (reading zip archive:|locating ))"
        r"|^(safetensors\.\w+\.|safetensors_rust\.)SafetensorError: Error while deserializing header: "
        r"|^ValueError: loaded state dict contains a parameter group that doesn't match the size",
    ),
    (
        "model-config",
        r"^OSError: It looks like the config file at '.+' is not a valid JSON file\.$"
        r"|^ValueError: (Asking to pad but the tokenizer does not have a padding token\."
        r"|Cannot use chat template functions because)",
    ),
    (
        "hub-access",
        r"^huggingface_hub\.(errors|utils\._errors)\.(GatedRepoError: 40[13]"
        r"|RevisionNotFoundError: 404) Client Error\b"
        r"|^OSError: You are trying to access a gated repo\.$"
        r"|^(requests\.exceptions"
        r"|huggingface_hub\.\w+)\.\w*HTTPError: 429 Client Error: Too Many Requests for url:"
        r" https://huggingface\.co/",
    ),
    (
        "missing-secret",
        r"^KeyError: '(\w*_)?(TOKEN|API_?KEY|SECRET|PASSWORD|ACCESS_KEY)'$"
        r"|^wandb\.errors\.[\w.]*UsageError: api_key not configured \(no-tty\)\.",
    ),
    (
        "store-access",
        r"^botocore\.\w+\.\w+: An error occurred \((AccessDenied|403|ExpiredToken"
        r"|InvalidAccessKeyId|SignatureDoesNotMatch)\)"
        r" when calling the (Get|Put|Head|List|Copy|Delete|Create|Upload|Complete)\w*(Object|Bucket|Part"
        r"|MultipartUpload)\w* operation"
        r"|^botocore\.exceptions\.NoCredentialsError: Unable to locate credentials$"
        r"|^google\.auth\.exceptions\.DefaultCredentialsError: |(does not have"
        r"|denied on) .*\bstorage\.(objects|buckets)\.\w+ ",
    ),
    (
        "network",
        r"^(requests"
        r"|urllib3)\.exceptions\.\w+: .*HTTPS?ConnectionPool\(host='[^']+', port=\d+\): Max retries exceeded"
        r" with url: .*"
        r"(NameResolutionError|NewConnectionError|Network is unreachable|Temporary failure)"
        r"|^botocore\.exceptions\.(EndpointConnectionError: Could not connect|ConnectTimeoutError: Connect timeout) ",
    ),
    (
        "toolchain",
        r"\bMissingCUDAException: CUDA_HOME does not exist, unable to compile CUDA op"
        r"|^AssertionError: CUDA_HOME does not exist, unable"
        r"|^OSError: CUDA_HOME environment variable is not set\."
        r"|InvalidCxxCompiler: No working C\+\+ compiler found in "
        r"|^RuntimeError: (Ninja is required to load C\+\+ extensions"
        r"|Failed to find C compiler\. Please specify via CC environment)",
    ),
    (
        "requirements-conflict",
        r"^ERROR: (Cannot install .+ because these package versions have conflicting dependencies\.$"
        r"|No matching d)",
    ),
    (
        "binary-mismatch",
        r"^ImportError: \S+: (undefined symbol: \w+|version `(GLIBC|GLIBCXX"
        r"|CXXABI)_[\d.]+' not found \(required by .+\))",
    ),
    (
        "missing-module",
        r"^ModuleNotFoundError: No module named '[a-zA-Z]\w*'$"
        r"|: Error while finding module specification for '[\w.]+' \(ModuleNotFoundError: No module named"
        r" '[a-zA-Z]\w*'\)$",
    ),
    (
        "parallel-config",
        r"^AssertionError: (Check batch related parameters\. train_batch_size is not equal to"
        r" micro_batch_per_gpu \* gradient_acc_step"
        r"|Micro batch size per gpu: \d+ has to be greater than 0)",
    ),
    (
        "device-or-dtype",
        r"^RuntimeError: (Expected all tensors to be on the same device, but found at least two devices, (?!cuda:\d+ and cuda:)"
        r"|mat1 and mat2 must have the same dtype, but got \w+ and \w+$|expected (scalar type"
        r"|target dtype to be) .+ but (found|got) \w+$"
        r"|Input type \(.+\) and weight type \(.+\) should be the same)"
        r"|^TypeError: can't convert cuda:\d+ device type tensor to numpy\.",
    ),
    (
        "bad-argument",
        r"^[\w./ -]+: error: (the following arguments are required: (?!.*(rank|world|master))"
        r"|unrecognized arguments: (?!.*--local[-_]rank)|argument .+: (invalid|expected|not allowed) )"
        r"|^Error: (No such option:? |Missing (option|argument) |Invalid value for (?!.*(Path|File|Directory) '))"
        r"|^ValueError: Some specified arguments are not used by the HfArgumentParser: \[",
    ),
    (
        "disk-full",
        r"^OSError: \[Errno (28\] No space left on device|122\] Disk quota exceeded)(: '.+')?$",
    ),
    ("permission", r"^PermissionError: \[Errno 13\] Permission denied: '.+'$|^\S+: line \d+: \S+: Permission denied$"),
    ("missing-file", r"^FileNotFoundError: (\[Errno 2\] No such file or directory: '.+'|Unable to find '.+')$"),
    (
        "nan-loss",
        r"^RuntimeError: Function '\w+' returned nan values in its \d+th output\.$"
        r"|^Exception: Current loss scale already at minimum - cannot decrease scale anymore\. Exiting run\.$"
        r"|^RuntimeError: probability tensor contains either `inf`, `nan` or element < 0$"
        r"|^Loss is nan, stopping training$",
    ),
    (
        "syntax-error",
        r"^(IndentationError|TabError): "
        r"|^SyntaxError: ('[(\[{]' was never closed|unterminated triple|unmatched )",
    ),
)

# What the system and its schedulers write beside the job, each with the exit codes that fit it; none: any.
BESIDE = {
    "host-memory": (
        re.compile(
            r"^slurmstepd: error: Detected \d+ oom[-_ ]kill event"
            r"|\b[Oo]ut of memory: Killed process \d+ \((python[\d.]*|pt_\w+|torchrun|train\w*)\)"
        ),
        (137, None),
    ),
    "gpu-hardware": (re.compile(r"NVRM: Xid \(PCI:[\w:.]+\): (48|74|79|95), "), ()),
    "timeout": (re.compile(r"^slurmstepd: .*\*\*\* (JOB|STEP) \S+ .*DUE TO TIME LIMIT"), ()),
    "spot-loss": (re.compile(r"^slurmstepd: .*\*\*\* (JOB|STEP) \S+ .*DUE TO PREEMPTION"), ()),
    "lost-node": (re.compile(r"^(slurmstepd|srun): .*DUE TO NODE FAILURE"), ()),
}

# A platform's or our launcher's own word for the end: a code or a sentence of its own, not a word that may stand anywhere.
CODES = table_of(
    ("stalled", r"\(limits\.stall\)$"),
    ("missing-secret", r"^the secret \S+ was not found"),
    ("missing-file", r"^the source has no file |^the input \S+ does not exist on this node"),
    ("wrong-world", r"^\d+ GPUs per node were asked for, this machine shows \d"),
    ("parallel-config", r"^parallelism\.\w+ is \d+"),
    (
        "disk-full",
        r"The node was low on resource: ephemeral-storage"
        r"|[Pp]od ephemeral local storage usage exceeds the total limit",
    ),
    (
        "image-pull",
        r"^(?!.*(dial tcp|lookup|[Tt]imeout|refused)).*\b(ImagePullBackOff|ErrImagePull)\b"
        r"|\bCannotPullContainerError\b|(manifest unknown|pull access denied for)\b",
    ),
    (
        "timeout",
        r"^max_runtime \(|(?<!code = )\bDeadlineExceeded\b|DUE TO TIME LIMIT|^Slurm: TIMEOUT|\bMaxRuntimeExceeded\b",
    ),
    (
        "host-memory",
        r"\bOOMKilled\b|The node was low on resource: memory\b"
        r"|^The replica \S+ ran out-of-memory and exited with a non-zero status of 9\(SIGKILL\)"
        r"|^Slurm: OUT_OF_MEMORY",
    ),
    ("bad-request", r"^sbatch: error: .*[Ii]nvalid partition"),
    (
        "quota",
        r"\(ResourceLimitExceeded\) when calling|: exceeded quota: \S+, requested: |\b(QOS(Max|Grp)|Assoc(Grp"
        r"|Max))(?!Wall)\w+"
        r"|The following quota metrics exceed quota limits: ",
    ),
    (
        "capacity",
        r"^CapacityError: |FailedScheduling: (?!.*(taint|affinity|selector"
        r"|Volume)).*nodes are available: .*Insufficient (nvidia\.com/gpu|cpu|memory)"
        r"|^Resources are insufficient in region: |\bInsufficientInstanceCapacity\b"
        r"|Requested node configuration is not available$"
        r"|\bZONE_RESOURCE_POOL_EXHAUSTED",
    ),
    ("lost-node", r"^(?!.*([Ss]pot|[Pp]reempt)).*(\bNODE_FAIL\b|\bNodeLost: Node \S+ which was running pod)"),
    (
        "platform-fault",
        r"^InternalServerError: |\((ServiceUnavailable|InternalFailure)\) when calling",
    ),
    (
        "store-access",
        r"^(?!.*(\b[Rr]ole\b|AssumeRole|not authorized to perform)).*\b(s3|gs)://\S+ .*(AccessDenied|403)"
        r"|\((AccessDenied|403)\) when calling the \w*(Object|Bucket)",
    ),
)
