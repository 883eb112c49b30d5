"""Which texts need the variables of a rank, and which run under plain python as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloudtrain.source import world
from cloudtrain.source.texts import Texts

NEEDS = {
    "a node's number": "import os\nnode = os.environ['NODE_RANK']\n",
    "plain torch": "import torch.distributed as dist\ndist.init_process_group('gloo')\n",
    "over env": "dist.init_process_group('gloo', init_method='env://')\n",
    "an address that is not known": "dist.init_process_group('gloo', init_method=args.dist_url)\n",
    "in a function": "def main():\n    dist.init_process_group('nccl')\nif __name__ == '__main__':\n    main()\n",
    "unless it is there": "r = int(os.environ.get('LOCAL_RANK', 0))\n"
    "if not dist.is_initialized():\n    dist.init_process_group()\n",
    "by the kind of device": "r = os.getenv('RANK', '0')\nif torch.cuda.is_available():\n    dist.init_process_group('nccl')\n",
    "a default for the device alone": "r = int(os.environ.get('LOCAL_RANK', 0))\ndist.init_process_group('nccl')\n",
    "a subscript": "rank = int(os.environ['RANK'])\n",
    "a look-up that must not fail": "rank = int(os.environ.get('RANK'))\n",
    "by getenv": "import os\nsize = int(os.getenv('WORLD_SIZE'))\n",
    "a mesh": "mesh = init_device_mesh('cpu', (1,))\n",
    "deepspeed": "engine, *_ = deepspeed.initialize(model=model)\n",
    "by an option": "if args.distributed:\n    dist.init_process_group('nccl')\n",
}
# The head of nanoGPT's train.py, torchvision's references/utils.py, and what runs in both ways.
RUNS_ALONE = {
    "nanoGPT": "ddp = int(os.environ.get('RANK', -1)) != -1\nif ddp:\n    init_process_group(backend='nccl')\n"
    "    ddp_rank = int(os.environ['RANK'])\nelse:\n    seed = 0\n",
    "torchvision": "def init(args):\n    if 'RANK' in os.environ and 'WORLD_SIZE' in os.environ:\n"
    "        args.rank = int(os.environ['RANK'])\n    elif args.none:\n        return\n"
    "    torch.distributed.init_process_group(backend='nccl', init_method=args.dist_url)\n",
    "an expression": "rank = int(os.environ['RANK']) if 'RANK' in os.environ else 0\n",
    "and": "first = 'RANK' not in os.environ or os.environ['RANK'] == '0'\n",
    "elastic": "if dist.is_torchelastic_launched():\n    dist.init_process_group()\n",
    "over tcp": "dist.init_process_group('gloo', init_method='tcp://127.0.0.1:1', rank=0, world_size=1)\n",
    "over a file": "dist.init_process_group('gloo', init_method='file:///tmp/x', rank=0, world_size=1)\n",
    "with a store": "dist.init_process_group('gloo', store=store, rank=0, world_size=1)\n",
    "in a comment": "# dist.init_process_group('gloo')\n'''os.environ['RANK']'''\n",
    "written": "os.environ['RANK'] = '0'\n",
    "the Trainer": "from transformers import Trainer\nTrainer(model).train()\n",
    "no Python": "os.environ['RANK'\n",
}


def why(tmp_path: Path, files: dict[str, str], entry: str = "train.py") -> str:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return world.why_needed(Texts(tmp_path, files, entry))


@pytest.mark.parametrize("name", NEEDS)
def test_a_script_that_needs_them(tmp_path: Path, name: str):
    assert why(tmp_path, {"train.py": NEEDS[name]}).startswith("train.py:"), NEEDS[name]


@pytest.mark.parametrize("name", RUNS_ALONE)
def test_a_script_that_runs_under_plain_python(tmp_path: Path, name: str):
    assert why(tmp_path, {"train.py": RUNS_ALONE[name]}) == ""


def test_the_reason_names_the_line(tmp_path: Path):
    text = "import os\n\nprint(os.environ['MASTER_ADDR'])\n"
    assert why(tmp_path, {"train.py": text}) == "train.py:3 reads MASTER_ADDR"
    assert why(tmp_path, {"go.sh": "echo ${RANK:-0}\necho $LOCAL_RANK\n"}, "go.sh") == "go.sh reads $LOCAL_RANK"
    assert why(tmp_path, {"go.sh": "echo ${RANK:-0}\n"}, "go.sh") == ""


def test_the_entry_may_ask_for_a_module_of_its_own(tmp_path: Path):
    module = "def begin(args):\n    if args.distributed:\n        dist.init_process_group('gloo')\n"
    asking = "args.distributed = int(os.environ.get('WORLD_SIZE', 1)) > 1\n"
    assert why(tmp_path, {"a.py": module, "train.py": "import a\n" + asking}) == ""
    assert why(tmp_path, {"a.py": module, "train.py": "import a\n"}).startswith("a.py:3 calls init_process_group")
    assert why(tmp_path, {"p/__main__.py": "import a\n" + asking, "a.py": module}, "-m p") == ""


def test_a_file_that_nobody_loads_decides_nothing(tmp_path: Path):
    needs = NEEDS["plain torch"]
    leaves = {"examples/ddp.py": needs, "tests/test_ddp.py": needs, "pkg/dist.py": needs, "pkg/__init__.py": ""}
    assert why(tmp_path, {**leaves, "train.py": "import pkg\n"}) == ""
    assert (
        why(tmp_path, {**leaves, "train.py": "def main():\n    from pkg import dist\n"})
        == "pkg/dist.py:2 calls init_process_group, and train.py loads it"
    )
    module = f"if __name__ == '__main__':\n    {needs.splitlines()[1]}\n"
    assert why(tmp_path, {"a.py": module, "train.py": "import a\n"}) == ""


def test_all_but_tests_decide_where_imports_cannot_be_followed(tmp_path: Path):
    files = {"tests/test_ddp.py": NEEDS["plain torch"], "train.py": "import runpy, sys\nrunpy.run_path(sys.argv[1])\n"}
    assert why(tmp_path, files) == ""
    assert (
        why(tmp_path, {**files, "jobs/ddp.py": NEEDS["plain torch"]})
        == "jobs/ddp.py:2 calls init_process_group, and train.py:2 calls run_path with what only the run knows"
    )
    assert why(tmp_path, files, "tests/test_ddp.py").startswith("tests/test_ddp.py:2")


@pytest.mark.parametrize(
    "text", [f"x = {' + '.join(['1'] * 1500)}", "if x == 0:\n    pass\n" + "elif x == 1:\n    y = 1\n" * 1500]
)
def test_generated_code_that_is_nested_deeply(tmp_path: Path, text: str):
    for name, more in {"train.py": "import made", "made.py": f"{text}\nimport os\nos.environ['RANK']"}.items():
        (tmp_path / name).write_text(more)
    line = text.count("\n") + 3
    why = world.why_needed(Texts(tmp_path, ["train.py", "made.py"], "train.py"))
    assert why == f"made.py:{line} reads RANK, and train.py loads it"


@pytest.mark.parametrize(
    ("files", "framework"),
    [
        ({"train.py": "import jax\n"}, ("jax", "train.py")),
        ({"train.py": "import step\n", "step.py": "from jax import numpy\n"}, ("jax", "step.py")),
        ({"train.py": "import tensorflow as tf\nimport jax\n"}, ("jax", "train.py")),
        ({"train.py": "import keras, jax, tensorflow\n"}, ("keras", "train.py")),
        ({"train.py": "import tensorflow.keras\n"}, ("tensorflow", "train.py")),
        ({"train.py": "import torch\nimport tensorflow\n"}, ("", "")),  # for its logs; torch is what trains
        ({"train.py": "import torch, jax\n"}, ("jax", "train.py")),
        ({"train.py": "import jaxtyping\n"}, ("", "")),
        ({"train.py": "import torch\n", "other.py": "import jax\n"}, ("", "")),
        ({"train.py": "import jax\n", "jax.py": "x = 1\n"}, ("", "")),  # a file of the source's own
    ],
)
def test_the_framework_is_what_the_entry_imports(tmp_path: Path, files: dict[str, str], framework: tuple[str, str]):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert world.framework(Texts(tmp_path, files, "train.py")) == framework


def test_jax_needs_its_world_only_where_it_is_asked_to_look_for_it(tmp_path: Path):
    asked = {"train.py": "import jax\njax.distributed.initialize()\n"}
    assert why(tmp_path, asked) == "train.py:2 calls jax.distributed.initialize"
    assert why(tmp_path, {"train.py": "import jax\njax.distributed.initialize('a:1', 1, 0)\n"}) == ""
