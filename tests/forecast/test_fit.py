"""Whether a training fits: the answers, their bands, and what plan and the command make of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudtrain.errors import BadJob
from cloudtrain.forecast import devices, fit, layout, models
from cloudtrain.job.job import Job
from cloudtrain.runs.planning import fit_check
from cloudtrain.runs.planning.plan import Planner
from cloudtrain.source.node_code import module
from tests.cli.conftest import cli  # noqa: F401 - a fixture

GIB = 1 << 30
TRAINER = {"trainer": True, "name": "t", "source": "/"}
EIGHT_B = {"model": "meta-llama/Llama-3.1-8B", "dataset": "python-stdlib", "bf16": True, "block_size": 4096,
           "per_device_train_batch_size": 1}  # fmt: skip


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def asked(gpus: str, parallelism: dict | None = None, **more) -> fit.Fit | str | None:
    job = Job(**{**TRAINER, "hyperparameters": EIGHT_B | more, "resources": {"accelerators": gpus},
                 "parallelism": parallelism or {}})  # fmt: skip
    return answered(job)


def answered(job: Job) -> fit.Fit | str | None:
    layout = job.parallelism.model_dump(mode="json")
    found = fit_check.training_of(job, layout, job.num_nodes, job.processes)
    return found if found is None or isinstance(found, str) else fit.answer(found, job.resources.accelerator or "GPU")


@pytest.mark.parametrize(
    "gpus, parallelism, more, answer",
    [
        ("H100:8", {"strategy": "fsdp"}, {}, fit.FITS),
        ("A100-80GB:8", {"strategy": "ddp"}, {}, fit.NOT),
        ("L4:8", {"strategy": "fsdp"}, {}, fit.NOT),
        ("H100:8", {"strategy": "fsdp"}, {"per_device_train_batch_size": 2}, fit.PERHAPS),
        ("H100:8", {"strategy": "fsdp", "tp_size": 2}, {}, fit.PROBABLY),
        ("H100:8", {"strategy": "zero3"}, {}, fit.PROBABLY),
        ("H100:8", {"strategy": "fsdp"}, {"use_peft": True}, fit.PROBABLY),
        ("H100:1", {}, {"use_peft": True, "gradient_checkpointing": True}, fit.FITS),
        ("L4:1", {}, {"use_peft": True}, fit.NOT),
        ("X1:8", {"strategy": "fsdp"}, {}, fit.PERHAPS),
    ],
)
def test_there_are_four_answers(gpus: str, parallelism: dict, more: dict, answer: str):
    found = asked(gpus, parallelism, **more)
    assert isinstance(found, fit.Fit) and found.answer == answer, found
    assert 0 < found.low < found.high and sum(found.terms.values()) > 0
    if answer in (fit.FITS, fit.NOT):
        assert not found.open
    elif answer == fit.PROBABLY and gpus == "H100:8" and "per_device_train_batch_size" not in more:
        assert found.open and found.open[0] in found.line, "what was never measured has no other answer, and says why"


def test_what_would_need_less_is_said_and_does():
    found = asked("A100-80GB:8", {"strategy": "ddp"}, per_device_train_batch_size=4)
    assert isinstance(found, fit.Fit)
    texts = [text for text, _, _ in found.changes]
    assert "parallelism.strategy: fsdp" in texts and "gradient_checkpointing: true" in texts
    assert all(high < found.high for _, _, high in found.changes)
    again = asked("A100-80GB:8", {"strategy": "fsdp"}, per_device_train_batch_size=4)
    assert (
        isinstance(again, fit.Fit)
        and {text: high for text, _, high in found.changes}["parallelism.strategy: fsdp"] == again.high
    )


def test_with_sharding_twice_the_gpus_need_less_of_each():
    found, twice = (asked(f"L4:{count}", {"strategy": "fsdp"}) for count in (8, 16))
    assert isinstance(found, fit.Fit) and isinstance(twice, fit.Fit)
    assert {text: high for text, _, high in found.changes}["twice the GPUs"] == twice.high < found.high


@pytest.mark.parametrize("gpus", ["A100-80GB:1", "L4:1", "A100-40GB:8"])
def test_what_fits_is_named_where_no_single_change_does(gpus: str):
    found = asked(gpus, None, bf16=False, per_device_train_batch_size=8)
    assert isinstance(found, fit.Fit)
    text, low, high = found.changes[-1]
    count = int(text.partition(" x ")[2].split()[0])
    assert text.startswith(f"fits: {gpus.partition(':')[0]} x {count} with ") and text.endswith("strategy: fsdp")
    single = "per_device_train_batch_size: 1, 8 times the accumulation" in text
    batch = (
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
        if single
        else {"per_device_train_batch_size": 8}
    )
    changed = {"bf16": True, "gradient_checkpointing": True, **batch}
    assert single == (gpus == "L4:1")
    applied = asked(f"{gpus.partition(':')[0]}:{count}", {"strategy": "fsdp"}, **changed)
    assert isinstance(applied, fit.Fit) and (applied.answer, applied.low, applied.high) == (fit.FITS, low, high)
    half = asked(f"{gpus.partition(':')[0]}:{count // 2}", {"strategy": "fsdp"} if count > 2 else None, **changed)
    assert isinstance(half, fit.Fit) and half.answer != fit.FITS, "it is the smallest number"


def test_a_plan_says_in_one_line_that_a_name_was_not_checked(cli, tmp_path: Path):  # noqa: F811
    job = {"name": "t", "trainer": True, "source": str(tmp_path), "target": "local"}
    job |= {"hyperparameters": EIGHT_B | {"model": "meta-llama/Llama-3.1-8"}, "resources": {"accelerators": "H100:1"}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    said = cli("plan", str(tmp_path / "job.yaml"))
    lines = [line for line in said.out.splitlines() if "unknown" in line]
    assert (
        said.code == 0
        and len(lines) == 1
        and "unknown, as the time is: the sizes of meta-llama/Llama-3.1-8" in lines[0]
    )
    assert "nothing has checked that name; known by name: llama-3.1-8b" in lines[0]


def test_lora_is_named_where_it_fits_on_one_gpu():
    found = asked("A100-80GB:1", None, bf16=False)
    assert isinstance(found, fit.Fit)
    text, low, high = next(change for change in found.changes if "use_peft" in change[0])
    applied = asked("A100-80GB:1", None, bf16=True, gradient_checkpointing=True, use_peft=True)
    assert isinstance(applied, fit.Fit) and (applied.low, applied.high) == (low, high)
    assert applied.memory and high <= applied.memory and text.startswith("fits: A100-80GB x 1 with bf16: true, ")


@pytest.mark.parametrize("parallelism", [None, {"strategy": "ddp"}, {"strategy": "fsdp"}])
@pytest.mark.parametrize("more", [{}, {"use_peft": True}, {"use_peft": True, "task": "chat"}], ids=str)
def test_no_band_begins_below_weights_gradients_and_optimizer(parallelism: dict | None, more: dict):
    gpus = "A100-80GB:8" if parallelism else "A100-80GB:1"
    found = asked(gpus, parallelism, gradient_checkpointing=True, block_size=256, **more)
    assert isinstance(found, fit.Fit)
    ranks = 8 if parallelism == {"strategy": "fsdp"} else 1
    each = 4 if more else 16  # bytes of a parameter: weights 4, gradients 4, AdamW 8; LoRA's own are few
    assert found.high > found.low >= each * 8_030_261_248 // ranks
    assert ("weights (frozen, float32)" in found.terms) == bool(more), "bf16: true does not change what is stored"


@pytest.mark.parametrize("parallelism", [None, {"strategy": "fsdp"}, {"strategy": "zero3"}])
def test_a_frozen_model_in_bfloat16_takes_two_bytes_a_parameter(parallelism: dict | None):
    gpus = "A100-80GB:8" if parallelism else "A100-80GB:1"
    more: dict = {"gradient_checkpointing": True, "block_size": 256, "use_peft": True}
    plain, found = asked(gpus, parallelism, **more), asked(gpus, parallelism, **more, dtype="bfloat16")
    assert isinstance(plain, fit.Fit) and isinstance(found, fit.Fit)
    adapter = 32 * 16 * (2 * 4096 + 4096 + 1024) * 4  # in float32, on queries and values
    ranks = 8 if parallelism else 1
    assert found.terms["weights (frozen, bfloat16)"] == (2 * 8_030_261_248 + adapter) // ranks
    assert found.terms["optimizer"] == plain.terms["optimizer"] == 2 * adapter // ranks
    if plain.answer != fit.FITS:
        assert {text: high for text, _, high in plain.changes}["dtype: bfloat16"] == found.high
    assert "dtype: bfloat16" not in [text for text, _, _ in found.changes]


def test_trained_weights_in_bfloat16_have_optimizer_state_in_it():
    parameters = 8_030_261_248
    for parallelism, each in ((None, 2), ({"strategy": "fsdp"}, 2), ({"strategy": "zero3"}, 4)):
        found = asked("A100-80GB:8" if parallelism else "A100-80GB:1", parallelism, dtype="bfloat16")
        assert isinstance(found, fit.Fit)
        ranks = 8 if parallelism else 1
        assert found.terms["weights"] == each * parameters // ranks, "DeepSpeed keeps float32 copies"
        assert found.terms["optimizer"] == 2 * each * parameters // ranks


def test_lora_in_bfloat16_is_named_where_float32_does_not_fit():
    found = asked("A100-40GB:1", None, bf16=False)
    assert isinstance(found, fit.Fit)
    text, low, high = next(change for change in found.changes if "use_peft" in change[0])
    assert text.endswith("use_peft: true, dtype: bfloat16")
    changed = {"bf16": True, "gradient_checkpointing": True, "use_peft": True, "dtype": "bfloat16"}
    applied = asked("A100-40GB:1", None, **changed)
    assert isinstance(applied, fit.Fit) and (applied.low, applied.high) == (low, high) and high <= (applied.memory or 0)


def test_sizes_are_those_of_the_driver():
    assert devices.size_bytes("A100") == devices.size_bytes("A100-40GB") == 40960 << 20, "the smallest that is meant"
    assert devices.size_bytes("h100") == 81559 << 20 and devices.size_bytes("TPU") is None


def test_from_scratch_the_sizes_are_the_arguments(tmp_path: Path):
    found = asked("T4:1", None, model="", hidden_size=512, num_hidden_layers=8, tokenizer="bpe:32000", bf16=False)
    assert isinstance(found, fit.Fit) and found.answer == fit.FITS
    assert "is unknown on this machine" in str(asked("T4:1", None, model="", tokenizer="me/words"))
    assert "are unknown: there is no config.json" in str(asked("T4:1", None, model="me/secret"))


def test_of_a_task_of_ones_own_nothing_is_claimed():
    assert asked("T4:1", task="mypkg.task:MyTask") == "the model is known on the node only: mypkg.task:MyTask"


def test_preferences_take_two_sequences_and_whole_logits():
    one, two = asked("H100:8", {"strategy": "fsdp"}), asked("H100:8", {"strategy": "fsdp"}, task="dpo")
    assert isinstance(one, fit.Fit) and isinstance(two, fit.Fit)
    whole_logits = 2 * 4096 * 128_256 * 4
    assert sum(two.terms.values()) - sum(one.terms.values()) > whole_logits


def test_of_a_script_nothing_is_claimed_unless_it_says_its_model():
    job = Job(name="s", source="/", entrypoint="train.py", resources={"accelerators": "T4:1"})
    assert answered(job) is None
    said = job.replace(fit={"model": "Qwen/Qwen2.5-7B", "batch": 1, "sequence": 512})
    found = answered(said)
    assert isinstance(found, fit.Fit) and found.answer == fit.NOT
    with pytest.raises(BadJob, match="fit"):
        job.replace(fit={"model": "gpt2"})
    with pytest.raises(BadJob, match="fit"):
        Job(**TRAINER, fit={"model": "gpt2", "batch": 1, "sequence": 8})


def test_plan_refuses_what_cannot_fit_unless_forced(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "t.py").write_text("")
    job = {**TRAINER, "source": str(source), "hyperparameters": EIGHT_B, "resources": {"accelerators": "L4:1"}}
    planner = Planner("kubernetes", home=tmp_path / "home")
    job |= {"image": "img:1", "output": "s3://b/x"}
    with pytest.raises(BadJob) as refused:
        planner.plan(job)
    assert "does not fit" in str(refused.value) and "--force" in str(refused.value)
    plan = Planner("kubernetes", home=tmp_path / "home", force=True).plan(job)
    assert plan.fit and plan.fit["answer"] == fit.NOT and plan.from_json(plan.to_json()).fit == plan.fit
    script = {"name": "s", "entrypoint": "t.py", "source": str(source), "image": "img:1", "output": "s3://b/x",
              "resources": {"accelerators": "L4:1"}}  # fmt: skip
    assert planner.plan(script).fit is None
    warned = planner.plan(script | {"fit": {"model": "llama-3.1-8b", "batch": 1, "sequence": 512}})
    assert warned.fit and warned.fit["answer"] == fit.NOT, "a script is never refused"


def test_the_page_shows_what_the_command_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli):  # noqa: F811
    page = (Path(__file__).parents[2] / "docs" / "fit.md").read_text()
    (tmp_path / "job.yaml").write_text(page.split('```yaml title="job.yaml"\n')[1].split("```")[0])
    command, shown = page.split("```\n$ cloudtrain ")[1].split("```")[0].split("\n", 1)
    monkeypatch.chdir(tmp_path)
    assert cli(*command.split()).out.startswith(shown)


def test_the_command_compares_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli):  # noqa: F811
    (tmp_path / "job.yaml").write_text(
        json.dumps({"name": "t", "trainer": True, "hyperparameters": EIGHT_B, "parallelism": {"strategy": "fsdp"}})
    )
    monkeypatch.chdir(tmp_path)
    shown = cli("fit", "job.yaml", "--gpus", "A100-80GB:8,H100:8,L4:4")
    assert shown.code == 0 and [line.split()[0] for line in shown.out.splitlines()[1:4]] == [
        "A100-80GB:8",
        "H100:8",
        "L4:4",
    ]
    rows = cli("fit", "job.yaml", "--gpus", "A100-80GB:8,H100:8,L4:4", "--json").json
    assert [row["answer"] for row in rows.values()] == [fit.FITS, fit.FITS, fit.NOT]
    assert cli("fit", "job.yaml", "--set", "hyperparameters.model=me/x").code == 2


def test_a_band_below_the_memory_is_not_said_to_be_too_large():
    gib = 1 << 30
    small = fit.Fit(fit.PROBABLY, "A10G", 22 * gib, 2 * gib, 8 * gib, {}, "", ("LoRA",))
    assert small.line.startswith("probably fits: needs 2.0 to 8.0 GiB of each A10G (22.0 GiB); not certain")
    assert fit.Fit(fit.PERHAPS, "A10G", 22 * gib, 9 * gib, 30 * gib, {}, "", ("LoRA",)).line.startswith("may not fit")


@pytest.mark.parametrize(
    "target, resources",
    [
        ("kubernetes", {"instance_type": "g5.xlarge"}),
        ("sagemaker", {"instance_type": "ml.g5.xlarge"}),
        ("vertex", {"instance_type": "g2-standard-4"}),
        ("local", {"accelerators": "A10G:1"}),  # neither they nor Slurm, ssh and Akash take a machine type
    ],
)
@pytest.mark.parametrize(
    "program",
    [
        {"entrypoint": "t.py"},
        {"entrypoint": "-m t"},
        {"entrypoint": ["torchrun", "t.py"]},
        {"run": "torchrun t.py"},
    ],
    ids=str,
)
def test_a_machine_type_has_the_answer_of_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, resources: dict, program: dict
):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    source = tmp_path / "source"
    source.mkdir()
    (source / "t.py").write_text("")
    bucket = "gs://b/x" if target == "vertex" else "s3://b/x"
    outputs = {} if target == "local" else {"output": bucket}
    images = {} if target == "local" else {"image": "registry.example/i@sha256:" + "0" * 64}
    options = {
        "sagemaker": {"role": "arn:aws:iam::123456789012:role/r", "bucket": "bucket-1", "region": "us-east-1"},
        "vertex": {"project": "project-1", "region": "us-central1", "bucket": "bucket-1"},
    }.get(target, {})
    job = {"name": "s", "source": str(source), **images, **outputs, **program, "options": {target: options}}
    job |= {"resources": resources, "fit": {"model": "llama-3.1-70b", "batch": 1, "sequence": 512}}
    plan = Planner(target, home=tmp_path / "home").plan(job)
    assert plan.fit and plan.fit["answer"] == fit.NOT, "70 billion parameters on one GPU of 24 GB"
    assert plan.manifest["gpus_per_node"] == 1, "what a rank sees"


def _kinds() -> dict[str, st.SearchStrategy]:
    """Return values for each argument of the shared trainer: right ones, wrong ones, and those of another kind."""
    arguments = module("trainer.arguments")
    words = st.sampled_from(["", "x", "none", "bpe:x", "bpe:0", "-1", "0", "1", "3", "1e300", "nan", "a,b", "8", "512"])
    more = {
        "model": st.sampled_from(["", "llama-3.1-8b", "gpt2", "me/x", "input:m", "input:", "/"]),
        "model_type": st.sampled_from([*models.FAMILIES, "mamba"]),
        "task": st.sampled_from(["causal-lm", "chat", "dpo", "sequence-classification", "m:C", "m:"]),
        "tokenizer": st.sampled_from(["", "gpt2", "bpe:", "bpe:x", "bpe:-1", "bpe:4096", "me/x"]),
    }
    return {
        item.name: more.get(item.name, st.booleans() | words | st.sampled_from(item.metadata["choices"] or [True]))
        for item in dataclasses.fields(arguments.Arguments)
    }


OTHERS = st.dictionaries(
    st.sampled_from(["load_in_4bit", "load_in_8bit", "optim", "deepspeed", "fsdp"]),
    st.sampled_from([True, "adamw_bnb_8bit", "adafactor", "muon", "x"]),
    max_size=1,
)
LAYOUTS = st.sampled_from(
    [
        {}, "auto", *({"strategy": name} for name in ("none", "ddp", "fsdp", "hsdp", "zero2", "zero3")),
        {"strategy": "fsdp", "tp_size": 2}, {"pp_size": 3}, {"cp_size": 2, "strategy": "fsdp", "offload": True},
    ]
)  # fmt: skip


@given(st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_no_setting_of_the_trainer_is_an_internal_error(data: st.DataObject):
    kinds = _kinds()
    names = data.draw(st.lists(st.sampled_from(sorted(kinds)), max_size=4, unique=True))
    said = {"model": "llama-3.1-8b", **{name: data.draw(kinds[name], name) for name in names}, **data.draw(OTHERS)}
    gpus = data.draw(st.sampled_from(["A10G:1", "H100:8", "X:3"]))
    try:
        job = Job(**{**TRAINER, "hyperparameters": said, "resources": {"accelerators": gpus},
                     "parallelism": data.draw(LAYOUTS)})  # fmt: skip
        job = layout.freeze(job)[0] if job.parallelism.strategy == "auto" else job
        found = fit_check.training_of(job, job.parallelism.model_dump(mode="json"), job.num_nodes, job.processes)
    except BadJob as refused:
        assert refused.problems
        return
    if not isinstance(found, str):
        assert found is not None and fit.answer(found, gpus.partition(":")[0]).line


def test_every_argument_alone_is_answered_or_refused():
    for name in [*_kinds(), "load_in_4bit"]:
        for value in (True, "x", "-1", "0", "1", "8", "1e300"):
            try:
                found = asked("A10G:1", **{name: value})
            except BadJob as refused:
                assert refused.problems
                continue
            assert isinstance(found, fit.Fit | str), name
