"""Recipes of TRL's and transformers' documentation, unmodified, with our checkpoints: a killed run ends as the unbroken one."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path

import pytest

from tests.entrypoints.training import ENTRYPOINTS, Trainer, train

pytestmark = [pytest.mark.timeout(1200), pytest.mark.train]
HERE, KILLED, SAVED = Path(__file__).parent / "recipes", 5, 4
HARNESS = Path(__file__).parents[1] / "entrypoints/own_scripts/recipe.py"
# TRL's own scripts, as `trl sft` runs them.
USUAL = (
    "--model_name_or_path made/llama --output_dir out --bf16 false --max_steps 8 --save_steps 2 "
    "--per_device_train_batch_size 2 "
)
GENERATED = "--per_device_train_batch_size 4 --num_generations 4 --max_completion_length 6 --learning_rate 1e-2"
TRL = {
    "sft": "--dataset_name made/texts",
    "dpo": "--dataset_name made/preferences",
    "kto": "--dataset_name made/judged",
    "reward": "--dataset_name made/preferences --model_name_or_path made/reward",
    "grpo": f"--dataset_name made/prompts --reward_funcs rewards.variety {GENERATED}",
    "rloo": f"--dataset_name made/prompts --reward_funcs rewards.variety {GENERATED}",
}
OURS = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in ("made", "rewards"))


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a bundle in which scripts find the runtime."""
    folder = tmp_path_factory.mktemp("path")
    for file in (ENTRYPOINTS / "path").glob("cloudtrain_*.py"):
        (folder / file.name).symlink_to(file)
    (folder / "cloudtrain_fence.py").symlink_to(ENTRYPOINTS / "launcher/fence.py")
    return folder


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of models and rows that recipes load."""
    folder = tmp_path_factory.mktemp("made")
    train(folder / "run", [str(folder)], script=HERE / "made.py")
    return folder


def command(name: str) -> list[str]:
    if name not in TRL:
        return [str(HERE / f"{name}.py")]
    found = importlib.util.find_spec("trl")
    assert found and found.submodule_search_locations
    return [f"{found.submodule_search_locations[0]}/scripts/{name}.py", *shlex.split(USUAL + TRL[name])]


def attempt(run: Path, name: str, world: int, made: Path, path: Path, number: int = 1, **env: object) -> Trainer:
    """Run an attempt to its end; the ranks' codes are in `ended`."""
    (run / "outputs").mkdir(parents=True, exist_ok=True)
    if number == 1:
        (run / "made").symlink_to(made)
        (run / "rewards.py").symlink_to(HERE / "rewards.py")
    more = {"PYTHONPATH": path, "HF_HOME": made / "cache", "HF_DATASETS_OFFLINE": 1, **env}
    with Trainer(run, command(name), world, more, number, HARNESS) as started:
        started.ended = started.codes()
    return started


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", [*(f"trl {name}" for name in TRL), *OURS])
def test_a_killed_recipe_ends_as_the_unbroken_one(name: str, world: int, made: Path, path: Path, tmp_path: Path):
    name = name.removeprefix("trl ")
    unbroken = attempt(tmp_path / "unbroken", name, world, made, path)
    assert unbroken.ended == [0] * world, unbroken.everything()
    run = tmp_path / "killed"
    killed = attempt(run, name, world, made, path, KILL_AFTER=KILLED)
    assert -9 in killed.ended, killed.everything()
    resumed = attempt(run, name, world, made, path, 2)
    assert resumed.ended == [0] * world, resumed.everything()
    record = json.loads((run / "checkpoints/epochs/00000002.json").read_text())
    assert (record["from"], record["step"]) == (f"checkpoint-{SAVED}", SAVED)
    expected, found = (json.loads((each / "outputs/result.json").read_text()) for each in (tmp_path / "unbroken", run))
    assert found["steps"] == expected["steps"] > KILLED
    assert len(expected["losses"]) == expected["steps"] and len(set(expected["losses"].values())) > 3, "it learns"
    assert found["losses"] == pytest.approx(expected["losses"], rel=0, abs=1e-6)
    assert found["weights"] == pytest.approx(expected["weights"], rel=0, abs=1e-5)


def test_there_are_recipes_of_both():
    assert len(TRL) + len(OURS) >= 20
