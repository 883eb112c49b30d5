"""What runs when: `make test` runs what is quick on a machine of two cores, `make test-all` everything but `long`.

Which tests are slow is written here, in one place. A name stands for a file or folder below tests/; of what it names,
the tests in SMOKE are quick nevertheless: one for each simulator and each family of training strategies, and what a
user on one machine would miss at once (benchmarks/seeded_faults.py finds such gaps).
"""

from __future__ import annotations

SLOW = (
    "backends/attached/test_backend.py",
    "backends/kubernetes/test_backend.py",
    "backends/kubernetes/test_faults.py",
    "backends/kubernetes/test_restarts.py",
    "backends/kubernetes/test_statuses.py",
    "backends/sagemaker/test_accounts.py",
    "backends/sagemaker/test_backend.py",
    "backends/sagemaker/test_faults.py",
    "backends/sagemaker/test_followed.py",
    "backends/sagemaker/test_images.py",
    "backends/sagemaker/test_local.py",
    "backends/sagemaker/test_sdk.py",
    "backends/sagemaker/test_statuses.py",
    "backends/slurm/test_backend.py",
    "backends/slurm/test_ends.py",
    "backends/slurm/test_followed.py",
    "backends/slurm/test_laws.py",
    "backends/slurm/test_login.py",
    "backends/slurm/test_quickstart.py",
    "backends/slurm/test_statuses.py",
    "backends/ssh/test_backend.py",
    "backends/ssh/test_faults.py",
    "backends/ssh/test_statuses.py",
    "backends/ssh/test_training.py",
    "backends/test_download.py",
    "backends/vertex/test_backend.py",
    "backends/vertex/test_exactly_once.py",
    "backends/vertex/test_images.py",
    "backends/vertex/test_local.py",
    "backends/vertex/test_refusals.py",
    "backends/vertex/test_restarts.py",
    "backends/vertex/test_statuses.py",
    "backends/vertex/test_trainer.py",
    "cli/test_vertex.py",
    "console/test_history.py",
    "console/test_live.py",
    "console/test_logbook.py",
    "console/test_newjob.py",
    "console/test_run.py",
    "console/test_runs.py",
    "entrypoints/launcher/output/test_storage.py",
    "entrypoints/launcher/prepare/test_requirements.py",
    "entrypoints/launcher/test_stall.py",
    "entrypoints/test_launch_nodes.py",
    "entrypoints/test_train_features.py",
    "entrypoints/test_train_resume.py",
    "entrypoints/test_train_world.py",
    "entrypoints/trainer",
    "history/test_old_home.py",
    "lab",
    "laws/test_law2_arguments.py",
    "laws/test_law3_outcomes.py",
    "laws/test_law3_outcomes_clusters.py",
    "laws/test_law3_outcomes_sdk.py",
    "laws/test_law5_cancel.py",
    "laws/test_law9_log.py",
    "laws/test_store_load.py",
    "nodes/test_ssh.py",
    "runs/test_distributed_env.py",
    "runs/test_exactly_once.py",
    "runs/test_faults.py",
    "runs/test_resume.py",
    "runs/test_watch_all.py",
    "simulators/test_vertex.py",
    "source/test_provenance.py",
    "test_examples.py",
    "test_training.py",
    "test_wheel.py",
    "testing/test_contract.py",
    "thirdparty",
)
SMOKE = (
    "runs/test_distributed_env.py::test_one_process_sees_none_of_a_ranks_variables",
    "runs/test_distributed_env.py::test_which_jobs_have_the_variables",
    "backends/test_download.py::test_a_stream_that_is_cut_at_3_of_8_mb_continues[s3]",
    "backends/test_download.py::test_the_command_says_what_is_full_and_exits_with_2",
    "entrypoints/trainer/data",
    "entrypoints/trainer/test_arguments.py",
    "entrypoints/trainer/test_best.py",
    "entrypoints/trainer/test_mfu.py",
    "entrypoints/trainer/strategies/test_mesh.py",
    "entrypoints/trainer/strategies/test_strategies.py::test_a_strategy_equals_one_process[ddp]",
    "entrypoints/trainer/strategies/test_strategies.py::test_a_strategy_equals_one_process[fsdp]",
    "entrypoints/trainer/strategies/test_strategies.py::test_a_strategy_equals_one_process[zero3]",
    "entrypoints/trainer/strategies/test_strategies.py::test_a_strategy_equals_one_process[tp]",
    "entrypoints/trainer/strategies/test_strategies.py::test_a_strategy_equals_one_process[pp interleaved]",
    "entrypoints/trainer/strategies/test_strategies.py::test_a_strategy_equals_one_process[cp]",
    "source/test_provenance.py::test_a_patch_makes_the_submitted_tree_from_the_commit",
)


def is_slow(node_id: str) -> bool:
    """Return whether a test, by its id below tests/, runs in `make test-all` only."""
    return _names(SLOW, node_id) and not _names(SMOKE, node_id)


def _names(names: tuple[str, ...], node_id: str) -> bool:
    return any(node_id == name or node_id.startswith((f"{name}/", f"{name}::")) for name in names)
