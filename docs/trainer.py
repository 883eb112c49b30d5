"""The page docs/training.md: what the shared trainer does, and its arguments as the code has them."""

from __future__ import annotations

from dataclasses import MISSING, fields

from strategies import table

from cloudtrain.source import node_code

HEAD = """\
# The shared trainer

A job with `trainer: true` is trained by cloudtrain's own script, `entrypoints/train.py`: one page, read from top to bottom, over
[Accelerate](https://huggingface.co/docs/accelerate). It learns causal language models and sequence classification, on one process or spread over
many in any of the ways below, on CPU or GPU. Your own script is as welcome: see `examples/own-script`.

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

## What it holds to

- **The loss is the mean over all labels of the global batch**, whatever the number of ranks, the accumulation or the lengths: two processes give the losses of
  one, within 1e-5 in fp32 (tested with clipping and accumulation).
- **Every token once.** Documents are joined and cut into blocks; nothing is padded, nothing is dropped but the last incomplete block.
- **The same order on any world.** Global batch *k* holds the same samples on one process as on two.
- **Evaluation counts every held-out sample once**, also where the world does not divide them.
- **Resume is exact.** Model, optimiser, schedule, every rank's random states, the place in the data and the running means are in the checkpoint. Killed at any step and resumed on the
  same number of processes, losses are bit-equal, dropout on (tested: SIGKILL in mid-training on 1 and 2 processes, with accumulation and loader workers). What lies in parts (fsdp, pp, cp; the long tests: tp, hsdp, interleaved, fsdp x tp,
  fsdp x pp, dp x cp, fsdp x cp, zero1, zero2, zero3) goes on to the bit as well, in the same layout, from an earlier checkpoint of a run whose later ones were torn; in another layout within 1e-5, dropout off
  (docs/checkpoints-evidence.md has the matrix).
- **A torn checkpoint is never chosen.** COMPLETE is written last, after a barrier: a list of sizes and sha256, verified when it is read. A damaged checkpoint is passed over, and said to be.
- **The world is what was asked.** When Accelerate sees another number of processes than the launcher states, the trainer leaves with 78 before the first step.
- **No host synchronisation at every step**: values leave the device at `logging_steps`.

On SIGTERM, or at a limit, the ranks agree on a step, save, and leave with 75.

## What people expect of a trainer

Each of these has a test that fails where it does nothing (tests/entrypoints/test_train_features.py and the tests of its rooms).

- **Pretraining** packs documents into blocks (above). `streaming: true` reads them as they come and keeps none: jsonl, csv and parquet by the row, text files by the file, hub
  datasets by their own streaming. Every rank reads the whole stream and takes its own blocks, so the order is that of one process, and a checkpoint holds the place to the token: a
  resumed run reads what lies before without tokenizing it. It is not shuffled, and tokenizing it on every rank limits how many there may be.
- **Chat** (`task: chat`): rows with `messages` (role, content), or `prompt` and `completion`, through the tokenizer's chat template. The loss is on the assistant's words alone
  (`assistant_only_loss`): by the template's `{% generation %}` marks, or, without them, by what each answer's turn adds; a template that rewrites earlier turns is refused. A tokenizer
  trained here gets ChatML.
- **LoRA** (`use_peft: true`, on a pretrained model): the adapter is saved alone, or merged into the model (`merge_adapter`). With none, ddp, fsdp, hsdp, zero1 to zero3 and `cp_size`: the
  frozen model and the adapter lie in parts as the strategy says, and are gathered at the end. Each compared with one process over 15 steps (fp32, clipping, two micro-batches; ddp and fsdp
  in every CI run, the others in the long tests): losses within 3e-7 of it, adapters within 5e-5, the model below equal to the bit, killed and resumed equal to the bit. Refused with
  `tp_size` and `pp_size`.
- **Global batch**: `global_batch_size` (samples) or `global_batch_tokens`; the accumulation follows from the number of ranks, and what they cannot share evenly is refused.
- **Early stopping and the best model**: `early_stopping_patience`, `load_best_model_at_end`. The best evaluation's checkpoint is never pruned.
- **Memory and speed**: the loss is made in chunks of tokens, so the logits (12 bytes x vocabulary x tokens) are never whole in memory; they are with `tp_size`, `pp_size`,
  `torch_compile` and families other than Llama, Qwen2, Qwen3, Mistral, Gemma, Phi-3, OLMo, GPT-2 and GPT-NeoX. `gradient_checkpointing`, `attn_implementation` (flash attention is refused where there is no GPU), `torch_compile` (with none and ddp; tested with the backend
  aot_eager on CPU), `optim: adamw_torch_fused`.

Flags that contradict each other end with 2 before torch is imported; what this machine, data or world cannot do ends with 78 before the first step: one sentence each.

## What it prints

Rank 0 prints one line per `logging_steps` (step, loss, learning rate, tokens/s, ETA) and emits the same as metrics: `cloudtrain metrics RUN`. The model lies as safetensors, with its
tokenizer, in the run's `model/`: `AutoModelForCausalLM.from_pretrained("out/model")` after `cloudtrain fetch RUN -o out`.

On GPUs that it knows the line has **MFU** beside tokens/s, and the events the metric `mfu` (0 to 1): the model's FLOPs of the tokens trained since the last line, over the peak of all ranks'
GPUs in the precision that is used. A token costs 6 operations for each parameter of a matrix product (4 where it is frozen, as below LoRA's adapter; embeddings nothing, the head what it
is), and attention 12 x layers x heads x their width x the length of its sample; padding and what is computed again cost nothing (Chowdhery et al., PaLM, appendix B). The clock runs through
evaluations and checkpoints, as for tokens/s. `flops_per_token`, `flops_per_pair` and `peak_flops` of the `world` event are what it is reckoned from. Known are A100, H100 (SXM, PCIe, NVL),
H200, B200, L4, L40, L40S, A10, A10G, A40, T4, V100, RTX A6000, 3090 and 4090, by the whole name that the driver gives, each with its data sheet's address in entrypoints/trainer/peaks.py. Nothing is
told on CPU, of slices (MIG) and other GPUs, of mixtures of experts and other families of which the formula was not held against torch's count of operations. It was never seen on a GPU: none
was at hand. The formula is tested against that count (equal to the operation for language models, within 3% for classifiers and 5% with an adapter on small ones), and a whole run on CPU
with a GPU's peak put in.

## Strategies

`parallelism` in the job file is all that changes. `tp_size`, `pp_size` and `cp_size` go with `ddp`, `fsdp` and `hsdp`, and `cp_size` with `tp_size`; what is left of the processes is
data parallel.

```yaml
parallelism: {strategy: fsdp}                                   # FSDP2: parameters, gradients and optimizer state in parts
parallelism: {strategy: hsdp, dp_replicate_size: 2}             # the same within a replica; left out, a node is a replica
parallelism: {strategy: zero2}                                  # zero1, zero2, zero3: DeepSpeed, from the extra `deepspeed`; `offload: true`
parallelism: {strategy: fsdp, tp_size: 4}                       # each layer over 4 neighbours, FSDP over the rest
parallelism: {strategy: ddp, pp_size: 4, microbatches: 8}       # layers in 4 stages; pp_schedule 1f1b, gpipe or interleaved (virtual_stages)
parallelism: {strategy: fsdp, cp_size: 4}                       # each sequence over 4 neighbours, parameters in parts over all
parallelism: auto                                               # the fastest layout that fits (docs/auto.md)
parallelism: {accelerate_config: fsdp.yaml}                     # an existing Accelerate file; a key that the trainer does not do is refused
```

Each case of this table trained the same 15 steps as one process did: the same global batch, fp32, clipping and two micro-batches a step, a held-out set of 13 samples, tied
embeddings unless it says otherwise. Loss and gradient norm are the largest differences at any step (the norm's relative to it); parameters on a rank are the largest share that any rank said it holds. Ranks
that hold the same parameters had bit-equal gradients. The wrapper and the shares come from the jobs' own `world` events, and the saved models agree within 2e-4.

STRATEGIES_TABLE

How it is done: Accelerate is the frame of all of them. none and ddp are its own; ZeRO is DeepSpeed through Accelerate; fsdp and hsdp are torch's FSDP2 on the model's layers; tp lays
matrices out as transformers' plan for the family says (Llama, Qwen, Mistral and others that have one; GPT-2 has none and is refused), all on one mesh; pp is
torch.distributed.pipelining over stages that run the family's own forward pass (families with a plan in transformers, and GPT-2). Tied embeddings across stages are kept equal by
summing their gradients. Neighbouring ranks share the most: pipeline, replica, shard, context, tensor, the last one the fastest.

Context parallel (`cp_size`) is for sequences that are too long for one rank: each has a part of every one, and all but attention is done token by token. For attention the keys and values
of a layer are gathered over the ranks and their gradients summed backwards, as Llama 3 was trained. It is no ring: keys and values of one layer at a time are whole on every rank, and backwards
they are gathered and attention is computed a second time (with `gradient_checkpointing` the whole layer is, and attention no third time), so that what a rank keeps in between is divided by
`cp_size`. A rank has one chunk from the front of a sequence and one from its end, so that all have the same work. Labels are shifted before sequences are cut, positions are given, a length that
cannot be cut is padded, grouped heads and sliding windows are as the family has them, each rank drops out its own. With ddp each rank holds the whole model, with fsdp parameters lie in parts
over data and context ranks together; gradients are summed over both. It is for the families of which parts were compared with whole sequences: Llama, Qwen2, Qwen3, Mistral, Mixtral, Gemma,
Gemma 3 (text), Phi-3, OLMo 2 and GPT-2; others, and positions that are turned by the length of a sequence (longrope, dynamic), are refused. Before the first step the model itself has to say of
a short sequence in parts what it says of it whole. The second `world` event has what attention saw on each rank, `tokens_per_rank` and `keys_per_rank`. It goes through
torch's scaled_dot_product_attention with an explicit mask, which on a GPU is not the fastest kernel, repeats grouped keys and values for every head, and takes three to five bytes for each pair
of a chunk's token and an earlier one: for very long sequences that decides what fits. Proven on CPU with gloo in fp32; by hand, six steps each, in bf16, with hsdp, and with fsdp and tp at once (eight ranks, losses within 1e-6 of one process). It never ran on a GPU or over NCCL.

What is checked while it runs: after it was put on, that the model really lies in parts along each axis (FSDP as Accelerate documents it runs DDP on CPU without a word); after the first
backward pass, that ranks with the same parameters have the same gradients (a replica x tensor recipe that leaves the sum out trains several models without a word). Either ends the job before the first step. The `world` event tells mesh, wrapper, placements, parameters on each rank, and a second one the gradient norms.

What a model or a machine cannot do is refused in one sentence before the first step: heads, columns or layers that do not divide, batches that micro-batches do not divide, ZeRO with tp, pp or cp, cp with pp or `torch_compile`,
fp16 with anything but none and ddp, offload without a GPU (ZeRO excepted), classification in a pipeline or over sequences in parts. A script of your own with `tp_size`, `pp_size` or `cp_size` must
say that it splits its model itself, in a comment line `# cloudtrain: tp_size`.

Checkpoints: none and ddp, `cp_size` or not, write one copy and go on with any number of processes. fsdp, hsdp, tp and pp write every rank's parts (torch.distributed.checkpoint), ZeRO DeepSpeed's own; they need a
folder that all nodes see or an output in an object store. There every node uploads its parts, and a restart brings all of them to every node.
ZeRO resumes in the layout that wrote it only; another one is refused.

## Limits today

torch 2.13 or newer, with the pinned pair of accelerate and transformers; on older images the trainer refuses with 78. Tested on CPU with gloo. Not tested here: GPUs and NCCL, bf16 on GPU,
offload from a GPU, hub models and datasets (their loading code is real, no hub could be reached), uploads to the Hub. Every rank first makes the whole model in CPU memory, then keeps its part.
ZeRO on CPU uses gloo instead of DeepSpeed's shared-memory kernel, which would have to be compiled.

## Arguments

Names and meanings are those of transformers' `TrainingArguments` where one exists. `-1` means "not limited" where a number of steps or samples is asked for.
"""


def trainer_page(written: str) -> str:
    """Return the page; `written` is the mark of a generated part."""
    rows = [
        HEAD.replace("STRATEGIES_TABLE", "\n".join(table())).rstrip(),
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
