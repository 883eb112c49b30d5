"""Every strategy against one process: the same batches, losses, gradient norms, evaluations and trained model; and that
the model really lies as the strategy says, told by the running job itself.

The whole matrix is part of `make test-long`; docs/strategies.py runs it and writes the table of docs/tables-evidence.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests.entrypoints.training import TINY, Trainer, texts, train

pytestmark = [pytest.mark.train, pytest.mark.timeout(900)]

STEPS = 15
SIZES = ["--tokenizer", "bpe:304", "--num_hidden_layers", "4", "--num_attention_heads", "4", "--max_steps", str(STEPS)]
SIZES += ["--max_grad_norm", "0.5", "--max_eval_samples", "13", "--per_device_eval_batch_size", "3"]


class Case(NamedTuple):
    """A strategy, and what its `world` event must say: the wrapper, the axes along which parameters lie in parts, and the
    largest share of the parameters that a rank may hold."""

    world: int
    parallelism: dict
    wrapper: str
    axes: tuple[str, ...] = ()
    share: float = 1.0
    batch: int = 2  # of a rank; with two micro-batches a step, eight samples in all
    model: str = "llama"
    more: tuple[str, ...] = ()


def case(
    world: int, wrapper: str, *axes: str, share: float = 1.0, batch: int = 2, model: str = "llama", more=(), **said
):
    return Case(world, said, wrapper, axes, share, batch, model, tuple(more))


GROUPED = ("--num_key_value_heads", "2")
# At larger learning rates single steps magnify rounding: at 5e-3 the norm of its gradients shoots up from 1 to 9, and at
# 1e-3 one process that accumulates four batches of two instead of two of four is off ten times as far at step 10 as elsewhere.
UNTIED = ("--tie_word_embeddings", "false", "--learning_rate", "3e-4")
# Half of a tied model's layers and one of two copies of its embedding are more than half of it.
CASES = {
    "ddp": case(2, "DistributedDataParallel", strategy="ddp"),
    "fsdp": case(2, "FSDP2", "shard", share=0.51, strategy="fsdp"),
    "zero3": case(2, "DeepSpeedEngine", "shard", share=0.51, strategy="zero3"),
    "tp": case(2, "DTensor", "tensor", share=0.51, batch=4, tp_size=2),
    "pp interleaved": case(2, "PipelineStage", share=0.65, batch=4, pp_size=2, virtual_stages=2),
    "cp": case(2, "DistributedDataParallel", batch=4, cp_size=2),
    "dp x pp": case(4, "PipelineStage(FSDP2)", share=0.65, strategy="ddp", pp_size=2),
}
LONG = {
    "fsdp x tp": case(4, "FSDP2", "shard", "tensor", share=0.26, strategy="fsdp", tp_size=2),
    "hsdp": case(4, "FSDP2", "shard", share=0.51, batch=1, strategy="hsdp", dp_replicate_size=2),
    "zero1": case(2, "DeepSpeedEngine", strategy="zero1"),
    "zero2": case(2, "DeepSpeedEngine", strategy="zero2"),
    "zero3 offload": case(2, "DeepSpeedEngine", "shard", share=0.51, strategy="zero3", offload=True),
    "dp x tp": case(4, "FSDP2", "tensor", share=0.51, strategy="ddp", tp_size=2),
    "dp x cp": case(4, "DistributedDataParallel", strategy="ddp", cp_size=2),
    "fsdp x cp": case(4, "FSDP2", "shard", share=0.26, strategy="fsdp", cp_size=2),
    "tp x cp": case(4, "FSDP2", "tensor", share=0.51, batch=4, tp_size=2, cp_size=2),
    "cp of 4": case(4, "DistributedDataParallel", batch=4, cp_size=4),
    "cp, parameters sharded": case(2, "FSDP2", share=0.51, batch=4, strategy="fsdp", cp_size=2),
    "cp, qwen2, grouped heads": case(2, "DistributedDataParallel", batch=4, model="qwen2", more=GROUPED, cp_size=2),
    "cp, gpt2, padded": case(
        2, "DistributedDataParallel", batch=4, model="gpt2", more=("--block_size", "18"), cp_size=2
    ),
    "pp 1f1b": case(2, "PipelineStage", share=0.65, batch=4, pp_size=2),
    "pp gpipe": case(2, "PipelineStage", share=0.65, batch=4, pp_size=2, pp_schedule="gpipe", microbatches=2),
    "pp of 4": case(4, "PipelineStage", share=0.42, batch=4, pp_size=4),
    "fsdp x pp": case(4, "PipelineStage(FSDP2)", "shard", share=0.35, strategy="fsdp", pp_size=2),
    "tp x pp": case(4, "PipelineStage", "tensor", share=0.35, batch=4, tp_size=2, pp_size=2),
    "fsdp, qwen2": case(2, "FSDP2", "shard", share=0.51, model="qwen2", strategy="fsdp"),
    "tp, qwen2": case(2, "DTensor", "tensor", share=0.51, batch=4, model="qwen2", tp_size=2),
    "tp, mistral": case(2, "DTensor", "tensor", share=0.51, batch=4, model="mistral", tp_size=2),
    "pp, mistral": case(2, "PipelineStage", share=0.65, batch=4, model="mistral", pp_size=2),
    "pp, qwen3, untied": case(2, "PipelineStage", share=0.55, batch=4, model="qwen3", more=UNTIED, pp_size=2),
    "fsdp, gpt2": case(2, "FSDP2", "shard", share=0.51, model="gpt2", strategy="fsdp"),
    "pp, gpt2": case(2, "PipelineStage", share=0.65, batch=4, model="gpt2", pp_size=2),
}
ALL = [*CASES, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Trainer]:
    """Return the run of one process that a case is compared with; each is trained once."""
    base, made = tmp_path_factory.mktemp("alone"), {}
    texts(base / "texts")

    def run(case: Case) -> Trainer:
        key = (case.model, case.more)
        if key not in made:
            made[key] = train(base / str(len(made)), arguments(base, case, 4), 1)
        return made[key]

    return run


def arguments(base: Path, case: Case, batch: int) -> list[str]:
    words = [*TINY, *SIZES, "--dataset", str(base / "texts"), "--model_type", case.model, *case.more]
    return [*words, "--per_device_train_batch_size", str(batch), "--gradient_accumulation_steps", "2"]


def furthest(one: dict[int, float], other: dict[int, float]) -> float:
    assert one.keys() == other.keys() and one
    return max(abs(one[step] - other[step]) for step in one)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


@pytest.mark.parametrize("name", ALL)
def test_a_strategy_equals_one_process(tmp_path: Path, alone: Callable[[Case], Trainer], figure: Callable, name: str):
    case = (CASES | LONG)[name]
    one = alone(case)
    texts(tmp_path / "texts")
    args = arguments(tmp_path, case, case.batch)
    many = train(tmp_path / "many", args, case.world, CLOUDTRAIN_PARALLELISM=json.dumps(case.parallelism))

    assert len(one.losses()) == STEPS and max(one.norms().values()) > 0.5, "clipping must have had something to do"
    loss = furthest(one.losses(), many.losses())
    # Of the norm itself: where it shoots up its last digits mean little.
    norm = max(abs(many.norms()[step] - found) / found for step, found in one.norms().items())
    held = furthest(one.held_out(), many.held_out())
    assert loss < 1e-5 and norm < 1e-5 and held < 1e-5

    world = many.events("world")[0]
    assert (world["world_size"], world["wrapper"]) == (case.world, case.wrapper)
    assert len(world["parameters_per_rank"]) == case.world
    for axis in ("shard", "tensor"):
        in_parts = any(
            f"{axis}:S" in place or f"{axis}:_S" in place or f"{axis}:flat" in place for place in world["placements"]
        )
        length = world["mesh"].get(axis, 1)
        assert in_parts == (axis in case.axes) or length == 1, world["placements"]
    most = max(world["parameters_per_rank"]) / world["parameters"]
    assert most <= case.share and (case.share == 1.0) == (most == 1.0), world["parameters_per_rank"]
    expected = {"zero1": ([0.5] * 2, False), "zero2": ([0.5] * 2, True), "zero3": ([0.5] * 2, True)}
    if (zero := world["strategy"]) in expected:
        shares = [round(count / world["parameters"], 2) for count in world["optimized_per_rank"]]
        assert (shares, world["gradients_in_parts"]) == expected[zero]
    check_replicas(many, case)
    check_sequences(many, case)

    first, second = weights(one.run), weights(many.run)
    assert first.keys() == second.keys()
    apart = max((first[key] - second[key]).abs().max().item() for key in first)
    assert apart < 2e-4
    if name in CASES:
        check_it_loads(tmp_path / "many" / "model", first)
    figure(
        "strategy",
        {
            "name": name, "world": case.world, "parallelism": case.parallelism, "wrapper": world["wrapper"],
            "model": case.model, "placements": world["placements"], "parameters": world["parameters"],
            "parameters_per_rank": world["parameters_per_rank"], "loss": loss, "norm": norm, "held": held, "weights": apart,
        },
    )  # fmt: skip


def check_replicas(run: Trainer, case: Case) -> None:
    """Ranks that hold the same parameters had the same gradients before the first step, to the bit."""
    if str(case.parallelism.get("strategy")).startswith("zero"):
        return
    norms = run.events("world")[1]["gradient_norms_per_rank"]
    axes = ("pipeline", "replicate", "shard", "context", "tensor")
    mesh = {axis: run.events("world")[0]["mesh"].get(axis, 1) for axis in axes}
    sharded = case.parallelism.get("strategy") in ("fsdp", "hsdp")
    parts = mesh["shard"] * (mesh["context"] if sharded else 1)  # over which every parameter is dealt out
    stage = case.world // mesh["pipeline"]
    same: dict[tuple, set[float]] = {}
    for rank, norm in enumerate(norms):
        place = (rank // stage, rank // mesh["tensor"] % parts, rank % mesh["tensor"])
        same.setdefault(place, set()).add(norm)
    assert len(norms) == case.world and all(len(values) == 1 for values in same.values()), norms
    assert len(same) == mesh["pipeline"] * parts * mesh["tensor"]


def check_sequences(run: Trainer, case: Case) -> None:
    """Ranks that share sequences had a part of them only, which the attention saw and told; no others tell anything."""
    size = case.parallelism.get("cp_size", 1)
    told = run.events("world")[1] if case.world > 1 and run.events("world")[1:] else {}
    assert run.events("world")[0]["mesh"].get("context", 1) == size
    if size == 1:
        assert "tokens_per_rank" not in told
        return
    length = int(case.more[1]) if "--block_size" in case.more else 16
    length += -length % (2 * size)
    assert told["tokens_per_rank"] == [length // size] * case.world
    assert told["keys_per_rank"] == [length] * case.world


def check_it_loads(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    from transformers import AutoModel, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    state = model.state_dict()
    assert all((state[name] - tensor).abs().max() < 2e-4 for name, tensor in weights.items())
    assert AutoModel.from_pretrained(folder).config.num_hidden_layers == 4


@pytest.mark.long
def test_conversations_in_parts_equal_whole_ones(tmp_path: Path):
    """Lengths of their own that cannot be cut equally, answers alone learned, layers computed again."""
    turns = [[("user", "ab " * (number % 5 + 1)), ("assistant", "cd ef " * (number % 7 + 1))] for number in range(60)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in each]} for each in turns]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = [*TINY, *SIZES, "--task", "chat", "--dataset", str(tmp_path / "chats.jsonl"), "--block_size", "64"]
    args += ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2", "--gradient_checkpointing"]
    one = train(tmp_path / "one", args)
    many = train(tmp_path / "many", args, 2, CLOUDTRAIN_PARALLELISM='{"cp_size": 2}')
    assert len(one.losses()) == STEPS
    assert furthest(one.losses(), many.losses()) < 1e-5 and furthest(one.held_out(), many.held_out()) < 1e-5
    assert furthest(one.norms(), many.norms()) < 1e-4
    told = many.events("world")[1]
    assert told["tokens_per_rank"][0] * 2 == told["keys_per_rank"][0] and len(told["tokens_per_rank"]) == 2


REFUSED = {
    "heads": (2, {"tp_size": 2}, ["--num_attention_heads", "1"], "tp_size 2 does not divide the model's 1 attention heads"),
    "layers": (2, {"pp_size": 2, "virtual_stages": 2}, ["--num_hidden_layers", "6"], "6 layers cannot be split"),
    "gpt2 has no plan": (2, {"tp_size": 2}, ["--model_type", "gpt2"], "transformers has no tensor parallel plan for gpt2"),
    "bert has no stages": (2, {"pp_size": 2}, ["--model_type", "bert"], "there is no pipeline plan for bert"),
    "context": (2, {"cp_size": 2}, ["--attn_implementation", "eager"], "cp_size 2 works with --attn_implementation sdpa"),
    "batch": (2, {"pp_size": 2}, ["--per_device_train_batch_size", "1"], "does not suit a pipeline of 2"),
    "offload": (2, {"strategy": "fsdp", "offload": True}, [], "parallelism.offload moves memory from GPUs, but the job has no "
        "GPU"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_model_cannot_do_is_refused_before_the_first_step(tmp_path: Path, name: str):
    world, parallelism, more, sentence = REFUSED[name]
    args = [*TINY, *SIZES, "--dataset", str(texts(tmp_path / "texts")), *more]
    with Trainer(tmp_path / "run", args, world, {"CLOUDTRAIN_PARALLELISM": json.dumps(parallelism)}) as refused:
        assert refused.codes() == [78] * world, refused.everything()
    assert [line for line in refused.output().splitlines() if line.startswith("train.py: ") and sentence in line]
    assert refused.losses() == {} and "Traceback" not in refused.output()


@pytest.mark.parametrize(
    "fault, world, parallelism, sentence",
    [
        # What Accelerate's documented FSDP does on CPU: DDP, without a word.
        (
            "from trainer.strategies import fsdp\nfsdp.fully_shard = lambda module, **_: module",
            2,
            {"strategy": "fsdp"},
            "no parameter is sharded on the axis shard",
        ),
        # Replicas of a tensor parallel model whose gradients are not summed: losses off by 0.3, and no error.
        (
            "from trainer.strategies import fsdp\nreal = fsdp.ShardedStrategy.learn\n"
            "def learn(self, *args):\n"
            "    shares = real(self, *args)\n"
            "    if self.plan.replicate > 1 and self.rank >= 2:\n"
            "        for each in self.model.parameters():\n"
            "            each.grad *= 1.01\n"
            "    return shares\n"
            "fsdp.ShardedStrategy.learn = learn",
            4,
            {"strategy": "ddp", "tp_size": 2},
            "hold the same parameters, but their gradients differ",
        ),
        # Each rank learns from its own part of the sequences.
        (
            "from trainer.strategies import ddp\n"
            "ddp.Strategy.accumulating = lambda self, more: self.accelerator.no_sync(self.model)",
            2,
            {"cp_size": 2},
            "hold the same parameters, but their gradients differ",
        ),
        # Tokens that look at what they are to say: losses fall as never before.
        (
            "from trainer.strategies import context_parallel\nreal = context_parallel.visible\n"
            "context_parallel.visible = lambda *given: real(*given) | True",
            2,
            {"cp_size": 2},
            "gives other results for a split sequence than for a whole one",
        ),
    ],
    ids=["silent ddp", "wrong replicas", "parts of sequences not summed", "no mask"],
)
def test_a_strategy_that_is_not_what_runs_is_found_out(
    tmp_path: Path, fault: str, world: int, parallelism: dict, sentence: str
):
    script = tmp_path / "faulty.py"
    script.write_text(f"{fault}\nimport sys, train\nsys.exit(train.main())\n")
    args = [*TINY, *SIZES, "--dataset", str(texts(tmp_path / "texts"))]
    env = {"CLOUDTRAIN_PARALLELISM": json.dumps(parallelism)}
    with Trainer(tmp_path / "run", args, world, env, script=script) as faulty:
        codes = faulty.codes()
    assert set(codes) <= {1, 78} and sentence in faulty.everything(), (codes, faulty.everything())
    assert faulty.losses() == {}
