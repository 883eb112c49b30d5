"""What a library's, a shell's or Python's own last words mean: rules over one line of a rank's log.

The more special class stands above the more general one: a full /dev/shm above a full disk, a full disk above an error
of files.
"""

from __future__ import annotations

from cloudtrain.diagnosis.rules import table_of

# The last line of a traceback, or a line that stands for itself (argparse, a shell, NCCL, a C++ library).
SIGNS = table_of(
    (
        "shared-memory",
        r"Bus error\. It is possible that dataloader's workers are out of shared memory"
        r"|Unexpected bus error encountered in worker|insufficient shared memory"
        r"|NCCL WARN .*(posix_fallocate|/dev/shm).*No space|(?i:creating shared memory segment)"
        r"|unable to (write to file"
        r"|open shared memory object) </torch_.*(No space|not enough)|unable to (write to"
        r"|allocate shared memory).*</?torch_.*No space|No space left on device.*/dev/shm|/dev/shm.*No space left",
    ),
    (
        "worker-killed",
        r"DataLoader worker \(pid(\(s\))?.*(killed by signal|exited unexpectedly)|BrokenProcessPool"
        r"|abruptly died during map|process pool (were|was) terminated abruptly",
    ),
    ("host-memory", r"Can't pickle <class '(\w+\.)*MemoryError'>"),  # the worker's, which could not be sent
    ("lost-node", r"marked dead because the detector has missed too many|because its node has died|NodeDiedError: "),
    (
        "unpicklable",
        r"(?i:can(not|'t) pickle |can't get local object|(?<!Un)PicklingError: )"
        r"|Can't get attribute '.*' on <module '__(mp_)?main__'|cannot be pickled",
    ),
    (
        "gpu-hardware",
        r"(?i)uncorrectable (ECC|NVLink)|fallen off the bus|GPU is lost|cudaErrorECC"
        r"|Unable to determine the device handle for GPU|CUDA error: hardware|double bit ecc|CUDA_?ERROR_?CONTAINED"
        r"|peer GPU memory over nvlink or a hardware error",
    ),
    (
        "gpu-memory",
        r"(CUDA|HIP|XPU|MPS backend|NPU) out of memory(?!.*more than 1EB)"  # of a size that was never meant
        r"|OutOfMemoryError: (?!.*more than 1EB).*(CUDA|HIP|GPU)"
        r"|CUDA (driver )?error: out of memory|(CUBLAS|CUDNN|CUSOLVER|CUFFT|CUSPARSE)_STATUS_ALLOC_FAILED"
        r"|cuda runtime error \(2\)|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|RESOURCE_EXHAUSTED: .*(GPU"
        r"|HBM|device)|Cuda failure.*out of memory|No available memory for the cache blocks"
        r"|Triton Error \[CUDA\]: out of memory|CUDA error 2: out of memory|enough GPU RAM to fit the"
        r"|tokens that can be stored in KV cache|RESOURCE_EXHAUSTED: Out of memory while trying to allocate"
        r"|OOM when allocating tensor .*device:GPU",
    ),
    (
        "host-memory",
        r"^MemoryError\b|ArrayMemoryError|CPUAllocator.*(can't allocate|not enough) memory|std::bad_alloc"
        r"|\[Errno 12\]|Cannot allocate memory|ArrowMemoryError|os error 12\)"
        r"|memory allocation of \d+ bytes failed|node running low on memory|killed due to memory pressure"
        r"|RayOutOfMemoryError: More than",
    ),
    (
        "index-range",
        r"Assertion .*(srcIndex|idx_dim|index out of bounds|n_classes|ind >=|ind_dim_size|cur_target|target_val"
        r"|index_size|self_dim_size|input_index|out of bounds)|index out of range in self"
        r"|Target -?\d+ is out of bounds|index -?\d+ is out of bounds for (dimension|axis)",
    ),
    (
        "nan-loss",
        r"(?i)returned nan values|loss scale already at minimum|minimum loss scale reached"
        r"|to satisfy the constraint .*found invalid values|probability tensor contains|Assertion .*(probability"
        r"|isnan)|\bloss (is|was|became|=|:) ?'?(tensor\()?(nan|inf|not finite|infinit)|loss .*(is nan|is inf"
        r"|not finite|non-?finite|became nan)|total norm .* is non-finite|(gradients?|grad norm|parameters|logits"
        r"|activations?) .*(contains? |are |is |became )(nan|inf\b|non-?finite)|nan (or inf )?(loss|gradient"
        r"|detected|found|encountered)|(detected|encountered|found) (a )?(nan|inf\b|non-?finite)|contains? (nan"
        r"|infinity)|NaN in (loss|grad)",
    ),
    (
        "cuda-version",
        r"no kernel image is available|driver on your system is too old|driver version is insufficient"
        r"|forward compatibility was attempted|unsupported toolchain|requires device with capability"
        r"|only supports (Ampere|Hopper|Turing|Volta)|cudaErrorInsufficientDriver|cudaErrorNoKernelImage|(not"
        r"|isn't) compatible with the current PyTorch installation.*Error|device kernel image is invalid"
        r"|cuda runtime error \(35\)|invalid device function|unsupported display driver / cuda driver combination"
        r"|cudaErrorSystemDriverMismatch|only supported on GPUs with compute capability",
    ),
    (
        "no-gpu",
        r"Torch not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs are available|invalid device ordinal"
        r"|no CUDA-capable device|_cuda_(setDevice|getDeviceCount)|devices?(\(s\))? (are|is|is/are) busy or unavailable"
        r"|deserialize object on (a )?CUDA device|(?i:no (gpus?|cuda) (was |were |is |are )?(found|available"
        r"|detected))|fp16 mixed precision requires a GPU|Your setup doesn't support bf16/gpu|no GPUs found"
        r"|CUDA (is not|isn't) available|requires? (a |at least one )?(CUDA )?GPU\b"
        r"|nvidia-smi: (command )?not found|(?i:mixed precision .*(can only be used|requires?|only) .*(gpu|cuda))"
        r"|cuda runtime error \((38|100|101)\)|Error 802: system not yet initialized|requires CUDA\.?$"
        r"|No supported gpu backend found|You requested gpu: .* But your machine only has|Failed to infer device type"
        r"|\bGPU is required to"
        r"|torch\.cuda\.is_available\(\) (is|returned) False|only \d+ (GPUs?"
        r"|devices?) (is|are) (available|visible)",
    ),
    (
        "wrong-world",
        r"\d+/\d+ (clients|workers) joined|initializing process group in store based barrier"
        r"|Duplicate GPU detected|env:// rendezvous: environment variable"
        r"|expected \d+ (ranks|processes|nodes)|world size (is|was) \d+.*(expected|but|not)"
        r"|(?i:world_?size .*does not match|number of (nodes|processes) .*(asked|expected))"
        r"|Multiple GPUs .* same device|rank \d+ >= world_size|invalid rank \d+",
    ),
    (
        "collective-timeout",
        r"Watchdog caught collective operation timeout|failed to pass monitoredBarrier|wait timeout after \d+ ?ms"
        r"|Timed out waiting \d+ms for (recv|send)|got error: (Socket Timeout|wait timeout)"
        r"|^\S*Error: Socket Timeout|Timeout at NCCL work|caught collective operation timeout"
        r"|timed out in monitoredBarrier|monitoredBarrier .*timeout|Application timeout caused pair closure"
        r"|Operation timed out!",
    ),
    (
        "port-in-use",
        r"(?i)address already in use|EADDRINUSE|\(?errno: 98\b|port \d+ is (already )?(in use|taken|occupied"
        r"|being used)",
    ),
    (
        "ddp-misuse",
        r"Expected to have finished reduction in the prior iteration|find_unused_parameters"
        r"|mismatch between collectives|appears not to match (sizes|strides) of the same param"
        r"|mark(ed)? .*ready (only once|twice)|Default process group has not been initialized"
        r"|initialize the default process group twice|DDP expects same model|DistributedDataParallel is not needed"
        r"|verif(y|ies) params|training graph has changed in this iteration|Inconsistent .* across ranks"
        r"|Mismatch in (tensor|collective)"
        r"|not used in producing the loss returned by training_step",
    ),
    (
        "checkpoint",
        r"loading state_dict for|SafetensorError: (?!.*(No space|os error 28|No such file))"
        r"|PytorchStreamReader failed|[Ww]eights only load failed|invalid load key|UnpicklingError"
        r"|(?i:checkpoint .*(corrupt|torn|incomplete|truncated|mismatch))|(?i:corrupt(ed)? .*checkpoint)"
        r"|loaded state dict (contains|has a different)|storage has wrong (byte )?size"
        r"|Can't find a valid checkpoint|(Missing|Unexpected) key\(s\) in state_dict|Unable to load weights from"
        r"|Unable to load .*checkpoint|no complete checkpoint|Missing key in checkpoint|CheckpointException"
        r"|unexpected EOF, expected \d+ more bytes|Invalid magic number; corrupt file",
    ),
    (
        "model-config",
        r"did not match any variant of untagged enum|config file at .* is not a valid JSON"
        r"|not recognize this architecture|Unrecognized (model in"
        r"|configuration class|model identifier)|does not have a padding token|no padding token (is|was) defined"
        r"|padding token .*not (set|defined)|Can't load (the )?(tokenizer|configuration|config|feature extractor"
        r"|image processor|processor)|does not appear to have (a )?files? named|Error no file named"
        r"|Tokenizer class .* (does not exist|is not)|instantiate the backend tokenizer|chat_template (is not set"
        r"|.*not set)|`?model_type`? key in its|trust_remote_code=True|`rope_scaling`|is not a multiple of .*heads"
        r"|(embed_dim|hidden[_ ]size|d_model)\b.*(divisible|multiple)|(divisible|multiple).*(num_heads"
        r"|attention heads)",
    ),
    (
        "hub-access",
        r"GatedRepoError|gated repo|RepositoryNotFoundError|RevisionNotFoundError|valid model identifier|(40[134]"
        r"|429) Client Error.*(huggingface\.co|hf\.co)|HfHubHTTPError: (40[134]|429)|doesn't exist on the Hub"
        r"|Invalid user token|Repository Not Found|Cannot access gated|DatasetNotFoundError"
        r"|HfHubHTTPError: Client error|(?i:rate limit.*huggingface|huggingface.*rate limit)"
        r"|EntryNotFoundError: 40[14]",
    ),
    (
        "missing-secret",
        r"KeyError: '\w*(API_?KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|ACCESS_KEY)\w*'|api_key not configured"
        r"|(?i:no api key|api[_ ]?key .*(must be|not|missing|required|unset)|(token|secret|password"
        r"|credential)s? .*(is not set|not set|is missing|was not found|not configured|is required, but"
        r"|must be set))|LocalTokenNotFound|Token is required|the secret \S+ was not found",
    ),
    (
        "store-access",
        r"NoCredentialsError|Unable to locate credentials|NoSuchBucket|PartialCredentials|InvalidAccessKeyId"
        r"|SignatureDoesNotMatch|DefaultCredentialsError|default credentials were not found|RefreshError"
        r"|storage\.(objects|buckets)\.\w+|(403|401|AccessDenied|Forbidden|ExpiredToken|InvalidToken"
        r"|PermanentRedirect|AllAccessDisabled)\b.* operation|(?i:access ?denied.*(s3|bucket|gs:))"
        r"|40[13] .*storage\.googleapis|bucket does not exist|AWS Access Key Id|CredentialRetrievalError"
        r"|TokenRetrievalError",
    ),
    (
        "network",
        r"NameResolution|Failed to resolve|Name or service not known|(?i:temporary failure in name resolution)"
        r"|getaddrinfo|gaierror|Connection refused|Network is unreachable|No route to host|SSLError"
        r"|CERTIFICATE_VERIFY_FAILED|ProxyError|ConnectTimeout|ConnectionError: .*(HTTP|Max retries"
        r"|Couldn't reach)|Max retries exceeded|<urlopen error|EndpointConnectionError"
        r"|Could not connect to the endpoint|OfflineModeIsEnabled|(?i:offline mode is enabled)"
        r"|couldn't connect to 'https|ReadTimeout|Read timed out|NCCL WARN .*([Cc]onnect\b.*failed|No route"
        r"|no socket interface)|while trying to connect to|RemoteDisconnected|no socket interface found"
        r"|wandb\.errors\.\S*CommError: .*timed out|Couldn't reach|APIConnectionError"
        r"|host(name)? .*(unreachable|not known)|Unable to find address for"
        r"|ClientConnectorError|connectFullMesh failed"
        r"|connecting to address .* is neither AF_INET",  # NCCL: the interface that was named is not there
    ),
    (
        "cuda-error",
        r"CUDA (driver |runtime )?error(?!: (device-side|unknown|initialization))|an illegal memory access"
        r"|unspecified launch failure|(CUBLAS|CUDNN|CUSOLVER|CUFFT|CUSPARSE)_STATUS_|[cC]u[dD][nN][nN] error"
        r"|Triton Error \[CUDA\]|cuda runtime error|cudaErrorLaunch|CUDA error\("
        r"|NCCL WARN Cuda failure (?!.*(shutting down|initialization error|unknown error))",
    ),
    (
        "toolchain",
        r"CUDA_HOME (does not exist|environment variable is not set)|MissingCUDAException|InvalidCxxCompiler"
        r"|No working C\+\+ compiler|Failed to find C compiler|(?i:unable to find .*compiler)"
        r"|No such file or directory: '?(\S*/)?(nvcc|gcc|g\+\+|cc|c\+\+|ninja|cmake|make)'|[Nn]inja is required"
        r"|Error (building extension|compiling objects)|command '?\S*(gcc|g\+\+|nvcc|ninja|cmake|clang)'? failed"
        r"|fatal error: \S+\.h: No such file|(nvcc|gcc|g\+\+|ninja|cmake|make|cc): (command )?not found"
        r"|CUDAMismatchException|does not match the version torch was compiled with|nvcc fatal"
        r"|No CUDA toolset|CMake must be installed|CppCompileError|CppCompileError|Python\.h: No such file"
        r"|[Cc]an't find Rust compiler|the Rust package manager, is not installed"
        r"|Cannot find nvcc|returned non-zero exit status.*\b(ninja|nvcc|gcc)\b|Command '\[?'?\S*(ninja|nvcc|gcc"
        r"|cc1plus)\b.*(returned|died)",
    ),
    (
        "requirements-conflict",
        r"ERROR: Cannot install |ERROR: No matching distribution|ERROR: Could not find a version.*\)$"
        r"|ResolutionImpossible|conflicting dependencies|No solution found when resolving"
        r"|requires a different Python|DO NOT MATCH THE HASHES",
    ),
    (
        "binary-mismatch",
        r"CUDA SETUP: Required library version not found|CUDA Setup failed despite|undefined symbol"
        r"|version `(GLIBC|GLIBCXX|CXXABI)\S*' not found|cannot open shared object file"
        r"|binary incompatibility|compiled using NumPy 1|numpy\.core\.multiarray failed to import"
        r"|invalid ELF header|wrong ELF class|was compiled (with|against|for) (a different|an older|another"
        r"|PyTorch|torch)|compiled with a different|different CUDA (major )?versions?"
        r"|operator torchvision::\w+ does not exist|DLL load failed|not a supported wheel|register_?fake"
        r"|_C\.\w*ABI|mismatches the version that was used to compile",
    ),
    (  # a package of which a part is looked for is there
        "wrong-version",
        r"No module named '(torch|torchvision|torchaudio|transformers|accelerate|datasets|peft|trl|deepspeed|diffusers"
        r"|numpy|scipy|pandas|sklearn|PIL|keras|tensorflow|pytorch_lightning|lightning|tokenizers)\.\w",
    ),
    (
        "missing-module",
        r"No module named|(?i:ImportError: .*(pip install|(is|to be) not installed|requires the .* (library|package)"
        r"|not found in your environment|please install|needs to be installed))|PackageNotFoundError"
        r"|requires the .* library but it was not found|(?i:\bplease (pip )?install (the )?[`'\w])"
        r"|DistributionNotFound",
    ),
    (
        "wrong-version",
        r"cannot import name '\w+' from '[\w.]+' \(\S*(site-packages|dist-packages)"
        r"|is required for a normal functioning|module 'numpy' has no attribute|module '(PIL|collections|inspect"
        r"|pkgutil|asyncio|pyarrow|scipy|pandas|numpy|torch|transformers|accelerate|datasets|tokenizers"
        r"|pkg_resources|jax|triton)[\w.]*' has no attribute|VersionConflict|ContextualVersionConflict"
        r"|(?i:requires? \S+ ?(>=|==|<=|~=|version).* but (you have|found|got|version))"
        r"|(?i:incompatible with .*version|version .* is (incompatible|not compatible|too old)|need to (upgrade"
        r"|downgrade))|cannot import name '\w+' from '(transformers|torch|accelerate|datasets|huggingface_hub"
        r"|tokenizers|peft|trl|numpy|deepspeed|diffusers|pydantic|typing_extensions)\b|requires (accelerate"
        r"|transformers|torch|peft|datasets|bitsandbytes|numpy) ?[`'\"]?(>=|==|<)|`?accelerate ?>="
        r"|from `accelerate>=",
    ),
    (
        "parallel-config",
        r"Check batch related parameters|Micro batch size per gpu|(?i:(world[ _]?size|(number|count) of (processes"
        r"|gpus|devices|ranks)|num_(gpus|processes)|tensor[ -]?(model )?parallel|pipeline[ -]?parallel"
        r"|data[ -]?parallel|tp_size|pp_size|tp_degree|dp_size|mesh).*(divisible|divide|multiple of|product"
        r"|must equal|does not match|mismatch))|(?i:(divisible|divide|multiple).*(world[ _]?size"
        r"|number of (processes|gpus|devices|ranks|nodes)|parallel[ _]size|tensor[ -](model )?parallel|tp_size"
        r"|num_(gpus|processes)))|can't train a model that has been loaded .*(device_map|distributed)"
        r"|correct the following DeepSpeed config values|(?i:(FSDP|DeepSpeed|ZeRO)\b.*(not (supported|compatible)"
        r"|incompatible|cannot be (used|combined)|mutually exclusive|doesn't support)|(device_map|not (supported"
        r"|compatible)|incompatible|cannot use) .*(distributed|DeepSpeed|FSDP|ZeRO))|nothing splits the model"
        r"|parallelism\.\w+ is",
    ),
    (
        "device-or-dtype",
        r"on the same device|(have|be) the same (d?type)|expected (scalar type|target dtype|m1 and m2"
        r"|mat1 and mat2)|[Ii]nput type .* (weight|bias) type|not implemented for '(Half|BFloat16|Long|Int|Bool"
        r"|Float|Double|Char|Byte|Short|ComplexFloat|Float8_e4m3fn)'|Found dtype|convert cuda.* tensor to numpy"
        r"|result type .* can't be cast|source and destination dtypes match|[Ee]xpected (object|tensor|all tensors"
        r"|a).*(scalar type|device type|on (cuda|cpu))|is on (CPU|cpu|cuda).*(but|expected)|unsupported ScalarType"
        r"|Only Tensors of floating point|expected .* but found .*(dtype|device)"
        r"|Expected tensor for argument .* to have|[Dd]type mismatch|device mismatch|do not have the same dtype"
        r"|should be the same\b|expected a '\w+' device type|uniform (original parameter )?dtype but got"
        r"|unscale FP16 gradients|only supports? fp16 and bf16 data type",
    ),
    (
        "shape-mismatch",
        r"shapes cannot be multiplied|size mismatch|shape mismatch|must match the size of tensor"
        r"|to match target batch_size|expects each tensor to be equal size|shape '\[.*\]' is invalid for input"
        r"|Sizes of tensors must match|inconsistent tensor size|Given groups=|could not (be )?broadcast"
        r"|inhomogeneous shape|(?i:target size .*(must be|that is different)|input and target (shapes|sizes))"
        r"|not broadcastable|Expected size .* but got|same number of dimensions|input\.size\(-1\) must be equal"
        r"|more than 1 value per channel|broadcast shape|batch[_ ]sizes? .*(do(es)? not|must|mismatch"
        r"|don't) ?match|(?i:expected .*\b\dD\b.*(input|tensor))|[Dd]imension(s)? (mismatch|out of|must match"
        r"|.* do not match)|excessive nesting|[Ii]ncompatible shapes|matmul: .*mismatch|different (shapes|sizes)"
        r"|must have (the )?same (shape|size)|Tensors must have same number|invalid combination of dims"
        r"|expanded size of the tensor|mat1 dim 1 must match|resize storage that is not resizable"
        r"|Unable to create tensor, you should probably activate|Expected \d-dimensional input for"
        r"|(Image|Video|Audio) features and \w+ tokens do not match|Kernel size can't be greater than actual input",
    ),
    (
        "bad-argument",
        r"^[\w./ -]+: error: (the following arguments are required|unrecognized arguments|argument "
        r"|ambiguous option|one of the arguments)|^Error: (No such option|Missing (option|argument|parameter)"
        r"|Invalid value|Got unexpected|No such command|Option )|HfArgumentParser|\w*(Arguments|Config|Args"
        r"|Trainer|Settings|__init__)(\.__init__)?\(\) got (an unexpected keyword|multiple values)"
        r"|Key '.*' is not in struct|ConfigAttributeError|ConfigKeyError|ConfigCompositionException"
        r"|Could not override|OverrideParseException|FATAL Flags parsing error|Unknown command line flag"
        r"|validation errors? for \w+(Config|Args|Arguments|Settings|Options)|is not a valid (IntervalStrategy"
        r"|SchedulerType|OptimizerNames|HubStrategy|SaveStrategy)|Could not consume arg|^hydra\.errors"
        r"|^ERROR: .*(unrecognized|unknown) (option|argument)|error: (invalid choice|unrecognized)|(?i:(unknown"
        r"|invalid|unrecognized) (option|argument|flag)\b)"
        r"|Target modules .* not found in the base model|training argument is set to '.*', which is not found"
        r"|The function received no value for the required argument|--load_best_model_at_end requires",
    ),
    (
        "disk-full",
        r"No space left on device|Disk quota exceeded|PytorchStreamWriter failed writing|iostream error"
        r"|unexpected pos \d+ vs|\[Errno (28|122)\]|os error (28|122)\)|ENOSPC|disk is full"
        r"|(?i:not enough (free )?(disk )?space)|Not enough disk space",
    ),
    (
        "permission",
        r"PermissionError|Permission denied|^(?!.*pthread_create).*Operation not permitted"
        r"|Read-only file system|\[Errno (13|30)\]",
    ),
    (
        "bad-data",
        r"JSONDecodeError|BadGzipFile|[Nn]ot a gzip|UnicodeDecodeError|codec can't decode|ParserError"
        r"|EmptyDataError|num_samples should be a positive|ArrowInvalid|DatasetGenerationError|DataFilesNotFound"
        r"|CastError|Couldn't cast|UnidentifiedImageError|cannot identify image file|image file is truncated"
        r"|BadZipFile|zlib\.error|_csv\.Error|csv\.Error|Parquet (magic|file)|(?i:column '?\S+'? .*(not|doesn't"
        r"|does not)|columns? .*(not (in|found)|missing|mismatch|don't match))|No columns in the dataset match"
        r"|tarfile\.ReadError|(?i:(dataset|data|file) is empty|empty (dataset|file|csv)|no (rows|samples"
        r"|examples)\b)|could not convert string to float|XMLSyntaxError|Keys? mismatch|does not match schema"
        r"|not a Parquet|Invalid key: \d+ is out of bounds for size 0|Found 0 \w+ in subfolders"
        r'|find any class folder|Instruction "\w+" corresponds to no data|Unknown split "'
        r"|lzma\.LZMAError|Compressed file ended before|Invalid data stream|YAMLError"
        r"|yaml\.\w+\.\w*Error|EOFError: Compressed",
    ),
    (
        "missing-file",
        r"Repo id must .*: '[/.~]|Incorrect path_or_model_id: '[/.~]|FileNotFoundError|NotADirectoryError"
        r"|No such file or directory|NoSuchKey|can't open file"
        r"|Parent directory .* does not exist|Couldn't find (a dataset script|any data file)|(?i:(file|folder"
        r"|directory|path) \S+ (does not exist|not found|doesn't exist|was not found))|(?i:\S+ is not a (file"
        r"|directory))|the source has no file|the input \S+ .*(is not|no )|command not found$|: not found$"
        r"|os error 2\)",
    ),
    (
        "signal",
        r"^ +traceback : Signal \d+ \(SIG\w+\) received by PID|^Fatal Python error: (Segmentation|Bus"
        r"|Aborted|Illegal|Floating)|Segmentation fault( \(core dumped\))?$"
        r"|Illegal instruction( \(core dumped\))?$|Bus error( \(core dumped\))?$|^Aborted( \(core dumped\))?$"
        r"|^Killed$|^srun: error: .*: (Bus error|Segmentation fault|Killed|Aborted|Illegal instruction)",
    ),
    ("script-error", r"start a new process before the|does not require grad and does not have a grad_fn"),
    (
        "syntax-error",
        r"^(SyntaxError|IndentationError|TabError): |syntax error near unexpected token|: Syntax error: ",
    ),
)
