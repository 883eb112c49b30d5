"""The pages docs/training.md and docs/trainer-evidence.md: the shared trainer, its arguments as the code has them, and its tests."""

from __future__ import annotations

from dataclasses import MISSING, fields

import versions
from strategies import table

from cloudtrain.source import node_code

HEAD = """\
# The shared trainer

Train a language model or a classifier without writing a script. `trainer: true` runs cloudtrain's own training program, on one process or on many, on CPU or GPU.
It is built on [Accelerate](https://huggingface.co/docs/accelerate).

```yaml
name: tiny-lm
source: .
trainer: true
hyperparameters:
  dataset: texts/*.txt           # files of the source, folders, globs, a hub dataset, or input:NAME
  tokenizer: bpe:4096            # trained first; or a hub name, or a folder
  model_type: llama              # from scratch; `model: gpt2` takes a pretrained one
  block_size: 256
  learning_rate: 3.0e-4
  max_steps: 1000
processes_per_node: 2
parallelism: {strategy: ddp}
checkpoint: {every: 5m, keep: 3}
```

```bash
cloudtrain submit job.yaml --follow
cloudtrain fetch -o out          # out/model: from_pretrained("out/model")
```

One task a page: [pretrain](how/pretrain.md), [fine-tune with LoRA](how/lora.md), [shard a large model](how/fsdp.md), [DPO](how/dpo.md), [your own task](how/own-task.md), [resume](checkpoints.md).
To train with a script of your own, see [Bring your script](scripts.md). [Choose a trainer](how/choose.md) compares it with TRL and torchtitan.

## What you can rely on

- The loss is the mean over all labels of the global batch. The number of ranks, accumulation and sample lengths do not change it.
- Each token is used once in an epoch. Documents are joined and cut into blocks. The last block is filled up with tokens that do not count.
- Global batch *k* holds the same samples for any number of ranks. Evaluation counts each held-out sample once.
- A resumed run gives the losses of an unbroken one ([what resumes as what](checkpoints-evidence.md)).
- The trainer exits with 78 before the first step if the number of processes is not the one that the job asked for.
- On SIGTERM, or at a time limit, all ranks save the same step and exit with 75.

[How the trainer was tested](trainer-evidence.md) has the figures.

## Tasks and data

- **Pretraining** packs documents into blocks. `streaming: true` reads jsonl, csv, parquet, text files and hub datasets without keeping them in memory. It needs
  `max_steps`. Each row is read by one rank, and each document tokenized by one. The ranks read at the same time: byte ranges of
  jsonl, row groups of parquet, other files and shards of hub datasets, each rank one of them. They hand each other the rows in an order that is the same on any number of ranks.
  Of what is not jsonl a rank reads 32 million characters before its turn. The other ranks wait for the rest of a longer row group, file or shard, and for a single csv or
  .json file: use jsonl, or smaller row groups and files.
  A stream is shuffled by a buffer of `shuffle_buffer_size` documents; rows in it are in memory.
- **Tokens are kept**, for all built-in tasks. From 32 MiB of text on, the ranks of a machine tokenize together, once, and keep the tokens in
  `~/.cache/cloudtrain/tokens`. The log has a progress bar. An interrupted start leaves its finished pieces to the next one. Later attempts and runs with the same text and tokenizer read the tokens
  memory-mapped. `token_cache: DIR` names another folder, also for small texts; use one that outlives the container. `token_cache: none` keeps nothing. You may delete
  the folder when no run is starting. Rows of jsonl, csv and hub datasets stay in their files. The texts of parquet and .json files are copied to `rows` in that folder,
  once for all ranks of a machine, and deleted after they are tokenized. With `token_cache: none` each rank has a copy in the temporary folder (`TMPDIR`). Where no copy can be
  written they are in memory, and the log says so. A .json file that is one object is one row, and in memory: use jsonl.
- **Chat** (`task: chat`): rows with `messages`, or with `prompt` and `completion`. The tokenizer's chat template is applied, and the loss counts the assistant's
  tokens only (`assistant_only_loss`). A template that changes earlier turns is refused.
- **Rows are checked by `plan`**, for all built-in tasks: it reads the first 20 rows of each data file that this machine has, of a folder or glob the first 50 files. A wrong one is refused with file, line and what is expected.
- **Classification** (`task: sequence-classification`): a text and a label in each row.
- **Preferences** (`task: dpo`): prompt, chosen and rejected in each row ([how](how/dpo.md)).
- **A task of your own** (`task: mypkg.task:MyTask`): a class gives model, data and loss ([how](how/own-task.md)). It may stream, use LoRA and the loss in chunks as these do.
- **LoRA** (`use_peft: true`, on a pretrained model): the run saves the adapter, or with `merge_adapter` the whole model. Not with `tp_size` or `pp_size`. `dtype: bfloat16` keeps the frozen model in bfloat16 ([how](how/lora.md)).

## Batch, memory, speed

- `global_batch_size` (samples) or `global_batch_tokens` sets the batch of one optimizer step over all ranks. Accumulation follows from it.
- `bf16` and `fp16` set the data type of the computation, `dtype` that of the weights in memory, as run_clm's `--dtype` does. Without LoRA, `dtype: bfloat16`
  trains weights in bfloat16, and gradients and AdamW's state are in bfloat16 too. That halves their memory, but small updates are lost: prefer `bf16` alone.
  With zero1 to zero3 it needs `bf16: true`, and DeepSpeed keeps float32 copies of trained weights. `dtype: float16` is for frozen weights only.
- `gradient_checkpointing` computes activations again instead of keeping them. `attn_implementation` chooses the attention. `torch_compile` works with none and ddp.
- In causal LM and chat the loss is computed in chunks of tokens, so that the logits are never whole in memory. Exceptions: `tp_size`, `pp_size`, `torch_compile`, and families other than
  Llama, Qwen2, Qwen3, Mistral, Gemma, Phi-3, OLMo, OLMo 2, GPT-2 and GPT-NeoX.
- `early_stopping_patience` ends the training early. `load_best_model_at_end` keeps the best evaluation's checkpoint and loads it at the end.

Arguments that contradict each other, or that the task does not read, are refused with exit code 2 before torch is imported. What the machine, the data or the number of ranks cannot do ends with 78
before the first step.

## What it prints

Rank 0 prints a line every `logging_steps` steps: step, loss, learning rate, tokens/s (of your own task with a `loss`, samples/s), ETA. `cloudtrain metrics RUN` has the same numbers. The model is saved as
safetensors, with its tokenizer, in the run's `model/`.

On a known GPU the line also has **MFU** (model FLOPs utilization): the FLOPs of the trained tokens over the peak of all GPUs, as in PaLM, appendix B. Known are A100, H100
(SXM, PCIe, NVL), H200, B200, L4, L40, L40S, A10, A10G, A40, T4, V100, RTX A6000, 3090 and 4090. There is no MFU on a CPU, on MIG slices and for mixtures of experts.

## Strategies

Change `parallelism`, and nothing else:

```yaml
parallelism: {strategy: fsdp}                                   # FSDP2: parameters, gradients and optimizer state sharded
parallelism: {strategy: hsdp, dp_replicate_size: 2}             # sharded within a replica; by default a node is a replica
parallelism: {strategy: zero2}                                  # zero1, zero2, zero3: DeepSpeed, from the extra `deepspeed`; `offload: true`
parallelism: {strategy: fsdp, tp_size: 4}                       # each layer split over 4 ranks, FSDP over the rest
parallelism: {strategy: ddp, pp_size: 4, microbatches: 8}       # layers in 4 stages; pp_schedule 1f1b, gpipe or interleaved (virtual_stages)
parallelism: {strategy: fsdp, cp_size: 4}                       # each sequence split over 4 ranks, parameters sharded over all
parallelism: auto                                               # the fastest layout that fits (docs/auto.md)
parallelism: {accelerate_config: fsdp.yaml}                     # an existing Accelerate file; an unknown key is refused
```

| you have | use |
| --- | --- |
| a model that fits on each GPU | `ddp` |
| a model that does not fit, on one node | `fsdp` |
| the same on several nodes with a slow network | `hsdp` |
| very wide layers | `fsdp` with `tp_size` |
| sequences too long for one GPU | `fsdp` with `cp_size` |
| a slow network between few large nodes | `pp_size` |

`tp_size`, `pp_size` and `cp_size` are combined with `ddp`, `fsdp` and `hsdp`, and `tp_size` with `pp_size` or `cp_size`. The remaining ranks are data parallel.

Before the first step the trainer refuses:

- heads, columns or layers that cannot be divided, and batches that micro-batches do not divide
- ZeRO with `tp_size`, `pp_size` or `cp_size`; `cp_size` with `pp_size` or `torch_compile`
- fp16 with anything but none and ddp; `offload` without a GPU (except ZeRO)
- tasks other than `causal-lm` with `pp_size`; classification with `cp_size`; DPO and your own tasks with `tp_size`, `pp_size` or `cp_size`
- `tp_size` for a family without a plan in transformers (GPT-2 has none)
- `cp_size` for families other than Llama, Qwen2, Qwen3, Mistral, Mixtral, Gemma, Gemma 3 (text), Phi-3, OLMo 2 and GPT-2
- `cp_size` with position embeddings that depend on the length (longrope, dynamic)

It also checks that the model is sharded as asked, and that ranks with the same parameters have the same gradients after the first backward pass.

With fsdp, hsdp, zero3, tp and pp each rank writes and reads its own part of a checkpoint only, with LoRA too. Several nodes then need a folder that all of them see, or an `output` in a store.

## Limits

- With fsdp, hsdp, zero3, `tp_size` and `pp_size` each rank loads only its part, from safetensors or drawn tensor by tensor; LoRA too. Your own task classes
  do so where `model()` builds [on the meta device](how/own-task.md#a-model-that-is-too-large-for-each-rank). Each rank builds the whole model first, and the log
  has a line, for quantized models, models without safetensors and experts that transformers packs. `train_distributed` sends the
  parameters as safetensors, of any size; each rank loads its part, and the log has a line where it cannot.
- With fsdp, hsdp, zero1 to zero3, `tp_size` and `pp_size` the trained model is written one tensor at a time. With LoRA only the adapter is gathered,
  and `merge_adapter` merges one layer at a time, tied embeddings too. With `pp_size` rank 0 loads the saved model to write a sample of its text, up to 1 GiB; a larger one gets no sample.
- `cp_size` keeps keys and values of one layer whole on each rank, and needs three to five bytes for each pair of tokens in a chunk.
- It needs torch 2.8, transformers 4.56 and accelerate 1.10. `tp_size`, `pp_size` and `cp_size` need torch 2.13, transformers 5.23 and accelerate 1.15. A plan
  refuses a stock image whose name says that it is too old; otherwise the trainer exits with 78.
- It was tested on CPUs with gloo. GPUs, NCCL, hub downloads and hub uploads were not available to the tests.

## Arguments

Names and meanings are those of transformers' `TrainingArguments` where one exists. `-1` means "not limited" where a number of steps or samples is asked for.
"""

EVIDENCE = """\
# How the shared trainer was tested

On CPUs with gloo, torch 2.13, fp32. No GPU, no NCCL and no model hub was available. [The shared trainer](training.md) is the page for users.

## Each strategy against one process

Each row trained the same 15 steps as one process: the same global batch, gradient clipping, two micro-batches a step, 13 held-out samples, tied embeddings
unless the row says otherwise. *Loss* and *gradient norm* are the largest differences at any step; that of the norm is relative. *Parameters on a rank* is the largest
share that a rank reported. The wrapper and the shares come from the jobs' own `world` events. Ranks with the same parameters had bit-equal gradients. The saved models
agree within 2e-4.

STRATEGIES_TABLE

## Older versions

`make test-versions` builds an environment for each row, trains eight steps with gradient checkpointing, and resumes for two more. A difference is the largest
of a loss from one process in the same environment.

VERSIONS_TABLE

With torch 2.8 checkpoints are written in the foreground. Before transformers 5 a pretrained model whose tensors have other names than the model's is loaded whole
by each rank. PyPI's CUDA builds ran on CPUs.

## Other claims

| claim | how it was tested |
| --- | --- |
| the mean over all labels | two processes against one, with clipping and accumulation, within 1e-5 |
| each feature of the page | `tests/entrypoints/test_train_features.py` and `tests/entrypoints/trainer`: each test fails where the feature does nothing |
| a rank loads its shard | `benchmarks/model_start.py`: a Llama of 888 million parameters, 8 ranks, bfloat16 files or drawn: the peak of anonymous memory above imports is 0.46 to 0.89 of 1.3 x shard + one tensor with fsdp, zero3, `pp_size`, LoRA, and a task of your own on the meta device (`benchmarks/results/model_start.md`). zero3: 252 MB read and 394 MB drawn, with a shard of 222 MB in bfloat16 (2026-11-26). With fsdp and 990 million: 575 and 669 MB, with a shard of 495 MB (2026-11-25). With LoRA at the start and at the save: 521 and 456 MB with a shard of 445 MB (fsdp), 315 and 232 MB with 222 MB (zero3), 240 and 234 MB with 223 MB (fsdp, `dtype: bfloat16`) (2026-11-26) |
| no rank holds the whole at save | `tests/entrypoints/trainer/strategies/test_memory.py`: an 84 MB Llama on two ranks (four for hsdp), one step. Above what a rank held, a checkpoint, its reading and the final save took less than 20 MB each. fsdp, hsdp, zero3, tp, pp and LoRA, merged or not, on tied embeddings too; zero1 and zero2 hold a replica and take no second one. Reading with zero3 took three times the shard for a moment: DeepSpeed reads its optimizer file at once. Each of eleven seeded faults that gather everything took 42 MB or more (2026-11-26) |
| LoRA | none, ddp, fsdp, hsdp, zero1 to zero3, cp against one process, 15 steps: losses within 3e-7, adapters within 5e-5, frozen weights bit-equal; killed and resumed bit-equal |
| weights in bfloat16 | `tests/entrypoints/trainer/strategies/test_dtype.py`, eight steps against one process. LoRA, frozen model in bfloat16, ddp, fsdp, hsdp: losses within 1e-6, adapters within 1e-7. With `cp_size`, or with `bf16` and fsdp, zero1 to zero3: losses within 2e-4. Trained weights in bfloat16, ddp, fsdp, tp, pp: losses within 5e-4. float16 was not trained |
| context parallel | in bf16, with hsdp, and with fsdp and tp on eight ranks: six steps by hand, losses within 1e-6 of one process |
| `torch_compile` | backend aot_eager on CPU, with none and ddp |
| a task of your own, DPO | two ranks with ddp, fsdp and zero1 to zero3 against one process, six steps with clipping and two micro-batches, 13 and 12 held-out samples: losses and metrics within 1e-5. hsdp was not run |
| what classes of the source use | `tests/entrypoints/trainer/data/test_own_task_features.py`: a class that derives from nothing, from `Task` and from each built-in class, with LoRA, evaluations, tables, parameter groups, streams and the loss in chunks where these apply: two ranks with ddp against one process, within 1e-5; two of them with fsdp (2026-11-26) |
| DPO | loss and reward accuracy of a trained model against the formula, computed without batches from the two saved models |
| speed | `benchmarks/gpu.py --cpu`, a small GPT-2 in bf16 on one CPU, three rounds on a quiet machine (2026-11-26): a step took 1.018 of the CPU time that the faster of a bare torch loop and transformers.Trainer took; start to the first step took 0.65 of Trainer's (`benchmarks/results/gpu_cpu.md`). Its GPU form was never run |
| kept tokens | `benchmarks/data.py`, 16, 64, 250 and 1000 MB of text: the first start took 11, 40, 167 and 751 CPU s, at most 536, 554, 541 and 578 MiB; the second 0.6, 0.8, 1.4 and 4.9 CPU s, at most 15 MiB (2026-11-26, `benchmarks/results/data.md`) |
| kept tokens of chat | `benchmarks/data.py --task chat`, 16 and 64 MB of jsonl: the first start took 13 and 50 CPU s, at most 23 MiB; the second 1.5 and 4.4 CPU s, at most 11 MiB. Parquet in one row group, .json and csv, up to 64 MB: at most 48 MiB (2026-11-26, `benchmarks/results/data.md`) |
| MFU | against torch's count of operations: equal for language models, within 3% for classifiers and 5% with an adapter on small ones; a whole run on CPU with a GPU's peak put in |

## What is its own, and why

Read in the source of accelerate 1.15.0, transformers 5.23.0, torch 2.13.0 (2026-11-26).

| part | reason |
| --- | --- |
| fsdp and hsdp, on torch's FSDP2 | Accelerate's `fsdp2_load_full_state_dict` takes the whole model from rank 0. Its `ParallelismConfig` takes FSDP2, several GPUs or DeepSpeed, so that data and tensor parallelism are refused on CPUs |
| `tp_size`, with transformers' plans | the same refusal on CPUs; the plans are transformers' own |
| `pp_size`, on torch.distributed.pipelining | Accelerate has no pipeline for training |
| `cp_size` | Accelerate's is torch's experimental `context_parallel`, with FSDP2 and the attention kernels of GPUs |
| the loop | transformers.Trainer has no pipeline, and cannot start in the middle of an epoch on another number of ranks with the same batches |
| the order of samples, and kept tokens | a resumed run has the same global batches on any number of ranks, without a second tokenization |
| reading and saving tensor by tensor | `save_pretrained` and Accelerate's `get_state_dict` hold the whole model on rank 0 |
| the loss in chunks | a loss over the vocabulary holds the logits of a whole batch |

Optimizers, schedules, models, tokenizers, adapters, trackers and ZeRO are torch's, transformers', peft's, Accelerate's and DeepSpeed's.

## How it is built

- none and ddp are Accelerate's own. ZeRO is DeepSpeed through Accelerate; on CPU it uses gloo instead of DeepSpeed's shared-memory kernel.
- fsdp and hsdp are torch's FSDP2 on the layers of the model. tp follows transformers' plan of the family. All use one device mesh.
- pp is torch.distributed.pipelining. Its stages run the family's own forward pass. Gradients of tied embeddings are summed across stages.
- cp gathers keys and values of one layer over the ranks, as Llama 3 was trained; it is no ring. In the backward pass they are gathered again and attention is computed a
  second time. A rank has one chunk from the front of a sequence and one from its end, for equal work. Before the first step the model is run on a short sequence,
  split and whole, and both results must agree.
- The order of ranks is pipeline, replica, shard, context, tensor: neighbouring ranks exchange the most.
- A token costs 6 operations for each parameter of a matrix product (4 where it is frozen), and attention 12 x layers x heads x head width x sample length. Padding and
  recomputation are not counted. The clock includes evaluations and checkpoints. `entrypoints/trainer/peaks.py` has the peak and the data sheet of each GPU.
"""


def evidence_page() -> str:
    """Return the page of the trainer's evidence."""
    tables = {"STRATEGIES_TABLE": table(), "VERSIONS_TABLE": versions.table()}
    page = EVIDENCE
    for mark, rows in tables.items():
        page = page.replace(mark, "\n".join(rows))
    return page


def trainer_page(written: str) -> str:
    """Return the page; `written` is the mark of a generated part."""
    rows = [
        HEAD.rstrip(),
        "",
        written,
        "",
        "| argument | default | meaning |",
        "| --- | --- | --- |",
    ]
    for item in fields(node_code.module("trainer.arguments").Arguments):
        default = item.default if item.default is not MISSING else item.default_factory()  # type: ignore[misc]
        if isinstance(default, bool):
            shown = "on" if default else "off"
        else:
            shown = f"`{default}`" if default not in ("", []) else ""
        choices = item.metadata.get("choices") or ()
        meaning = item.metadata["help"].replace("|", "\\|") + (f" One of {', '.join(choices)}." if choices else "")
        rows.append(f"| `{item.name}` | {shown} | {meaning} |")
    return "\n".join(rows) + "\n"
