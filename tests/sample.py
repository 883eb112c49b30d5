"""The tests of tier 3 that `.ci/run` runs: those of what a change touches, in at most six minutes on two cores.

A change is compared with origin/main, or with the commit of a day ago that this one came from. Where it touches more rows
of the table than MOST, or git knows nothing to compare with, a fixed sample runs: the short tests of each package.
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SSH = (
    "lab/test_lab.py",
    "backends/ssh/test_backend.py",
    "backends/ssh/test_statuses.py",
    "backends/ssh/test_inside.py",
)
SLURM = ("lab/test_lab.py", "backends/slurm/test_backend.py", "backends/slurm/test_statuses.py")
LAB = (*SSH, *SLURM, "nodes/test_ssh.py")
STRATEGIES = "entrypoints/trainer/strategies"
RESULTS = "backends/results/test_results.py::test_the_next_attempt_resumes_and_all_comes_home"
STOPS = "backends/results/test_stops.py::test_a_script_behind_any_wrapper_saves"
ENGINE = "entrypoints/test_trainer_resume.py::test_a_key_of_the_job_does_the_same_for_a_script_without_the_line"
INDEX = "runs/test_attach_all.py::test_concurrent_writers_of_the_index_lose_nothing[S3]"
FRAMEWORKS = "thirdparty/test_frameworks.py::test_two_nodes_train_as_the_framework_itself_does"
THIRD_PARTY = "thirdparty/test_scripts.py::test_it_ends_well_comes_home_and_resumes"
CHARTS = (
    "console/test_compare.py::test_200_runs_are_compared",
    "console/test_workspace.py::test_the_loss_is_first_and_charts_are_closed_pinned_moved_and_hidden",
    "console/test_run.py::test_curves_of_ranks_and_attempts_and_what_a_script_has_logged",
)

# What a changed path begins with: its tests of tier 3, as tests/tiers.txt names them.
TABLE = {
    "benchmarks/gpu": ("entrypoints/test_gpu_benchmark.py",),
    "cloudtrain/backends/akash/": (
        "backends/akash/test_backend.py",
        "backends/akash/test_faults.py",
        "backends/akash/test_outcomes.py::test_many_more_lost_answers_make_one_lease",
    ),
    "cloudtrain/backends/attached/": (
        INDEX,
        "runs/test_attach_resume.py::test_the_older_attempt_is_harmless",
        "backends/attached/test_backend.py::test_a_failed_run_of_a_cloud_is_told_from_its_bucket[sagemaker]",
    ),
    "cloudtrain/backends/kubernetes/": (
        "backends/kubernetes/test_backend.py",
        "backends/kubernetes/test_evaluation.py",
        "backends/kubernetes/test_security.py::TestSimulated::"
        "test_without_any_verb_of_the_role_a_run_ends_right_or_is_refused_before_it_is_created",
        "backends/kubernetes/test_jobset.py::TestJobSets::test_a_collective_over_two_nodes",
        "backends/kubernetes/test_jobset.py::TestJobSets::test_one_failing_node_ends_the_attempt",
        "backends/kubernetes/test_statuses.py::test_many_attempts_are_two_lists",
        "backends/kubernetes/test_restarts.py::test_a_pod_that_is_alone_is_started_anew_by_the_cluster[gs://local/out]",
        "backends/kubernetes/test_accounts.py::test_a_worker_that_hangs_is_replaced_and_delays_no_other",
        "backends/kubernetes/test_restarts.py::test_pods_of_one_second_come_one_after_the_other[higher]",
        "backends/kubernetes/test_restarts.py::test_a_queue_takes_its_pods_back_and_gives_new_ones",
        "laws/test_law3_outcomes_clusters.py::test_kubernetes_loses_answers",
    ),
    "cloudtrain/backends/local/": (
        f"{THIRD_PARTY}[ddp_tutorial-nodes]",
        "backends/local/test_backend.py::TestLocal::test_a_collective_over_two_nodes",
    ),
    "cloudtrain/backends/sagemaker/": (
        "backends/sagemaker/test_evaluation.py",
        "backends/sagemaker/test_followed.py",
        "backends/sagemaker/test_sdk.py::test_an_outage_of_the_estimators_is_no_refusal",
        "backends/test_keep.py::test_on_sagemaker",
        "backends/sagemaker/test_backend.py",
        "backends/sagemaker/test_queue.py",
        "backends/sagemaker/test_quickstart.py::test_quickstart_survives_the_loss_of_its_spot_machines",
        "backends/sagemaker/test_sdk.py::test_the_table_of_images_is_the_sdks",
        "backends/sagemaker/test_sdk.py::test_a_default_of_the_sdk_that_changes_the_job_is_refused_by_name",
        "backends/sagemaker/test_sdk.py::test_both_clients_say_the_same_of_every_refusal",
        "backends/sagemaker/test_heads.py::test_moto_describes_the_hyperparameters_of_the_notebook_by_either_client",
        "backends/sagemaker/test_followed.py::test_a_watcher_that_is_killed_loses_and_doubles_no_line",
        "laws/test_law3_outcomes_sdk.py::test_the_estimator_loses_answers",
        "laws/test_law3_outcomes.py::test_a_key_names_the_same_job_from_an_empty_history_too[sagemaker]",
        "backends/sagemaker/test_accounts.py::test_no_call_of_a_run_has_the_key_of_another",
        "backends/sagemaker/test_heads.py::test_they_run_on_the_simulator",
        "backends/sagemaker/test_sdk.py::test_both_clients_send_what_plan_printed",
        "backends/sagemaker/test_images.py::test_the_watcher_keeps_it_and_a_denial_is_in_nobodys_way[False]",
        "backends/sagemaker/test_quickstart.py::test_cancelled_by_the_command_line",
        "backends/results/test_results.py::test_the_next_attempt_resumes_and_all_comes_home[sagemaker-loop-{model_dir}]",
        "laws/test_law3_outcomes.py::test_lost_answers_make_one_job[sagemaker]",
    ),
    "cloudtrain/backends/slurm/": (
        *SLURM,
        f"{RESULTS}[slurm-loop-out]",
        f"{STOPS}[slurm]",
        "backends/slurm/test_login.py",
        "backends/slurm/test_placement.py",
    ),
    "cloudtrain/backends/ssh/": (
        *SSH,
        f"{RESULTS}[ssh-loop-out]",
        "backends/ssh/test_delivery.py",
        "nodes/test_ssh.py",
    ),
    "cloudtrain/simulators/azureml/": ("backends/azureml/test_ml_client.py",),
    "cloudtrain/simulators/blob": ("backends/azureml/test_ml_client.py",),
    "cloudtrain/backends/azureml/": (
        "backends/azureml/test_backend.py",
        "backends/azureml/test_ml_client.py",
        "backends/azureml/test_trainer.py",
    ),
    "cloudtrain/backends/vertex/": (
        "laws/test_law3_outcomes.py::test_lost_answers_make_one_job[vertex-sdk]",
        "backends/vertex/test_evaluation.py",
        "backends/vertex/test_local.py",
        "backends/vertex/test_refusals.py",
        "backends/vertex/test_quickstart.py::test_vertex_local_trains_on_two_machines_as_the_guide_says",
        "backends/vertex/test_restarts.py::test_a_spot_loss_is_a_restart_from_the_checkpoint[workerpool1-0]",
        "simulators/test_vertex.py::test_googles_sdk_agrees_with_it",
        "backends/vertex/test_restarts.py::test_a_crash_that_may_be_transient_is_tried_again",
        "backends/vertex/test_restarts.py::test_workers_that_come_late_are_waited_for",
        "cli/test_vertex.py::test_a_target_on_vertex_from_plan_to_fetch[sdk]",
        "laws/test_law3_outcomes.py::test_a_key_names_the_same_job_from_an_empty_history_too[vertex-rest]",
    ),
    "cloudtrain/console/": (
        "console/test_compare.py",
        "console/test_sweep.py",
        "console/test_keyboard.py",
        "console/test_compare.py::test_the_hyperparameter_that_decides_comes_first",
        "console/test_newjob.py::test_every_step_is_seemly",
        "console/test_workspace.py::test_charts_are_resized_and_the_layout_is_shared_as_a_file",
        "console/test_workspace.py::test_one_chart_shows_some_of_the_runs",
        "console/test_history.py::test_a_long_history_is_paged_searched_and_filtered",
        "console/test_live.py::test_several_live_runs_are_cancelled_and_resumed_together",
        "console/test_live.py::test_elapsed_step_and_time_to_go_tick",
        "console/test_newjob.py::test_roles_and_the_call_of_a_function_are_shown_as_what_they_are",
        "console/test_newjob.py::test_the_trainers_own_arguments_are_offered_and_checked",
        "console/test_newjob.py::test_a_repository_is_listed_when_it_is_asked_for_and_pinned",
        "console/test_newjob.py::test_a_rerun_marks_each_changed_value",
        "console/test_newjob.py::test_the_listing_follows_the_typed_source",
        "console/test_run.py::test_a_chain_is_shown_linked_and_cancelled_as_a_whole",
        "console/test_run.py::test_a_long_log_is_gone_through_with_the_keyboard",
        "console/test_runs.py::test_one_flow_by_keyboard_alone",
        "console/test_runs.py::test_the_timeline_is_whole_at_every_width",
        "console/test_runs.py::test_a_printed_report_keeps_the_last_lines_of_a_failure",
        "console/test_team.py::test_the_list_and_a_run_say_who_submitted_it_and_offer_only_what_works",
        "console/test_workspace.py::test_runs_are_hidden_isolated_coloured_and_compared_with_a_baseline",
        "console/test_workspace.py::test_axes_of_the_parallel_coordinates_are_chosen_and_dragged",
        "console/test_workspace.py::test_the_trials_of_a_sweep_are_sorted",
        "console/test_workspace.py::test_the_rows_of_a_comparison_are_searched",
        "console/test_workspace.py::test_a_chart_that_is_removed_while_plotly_loads_is_left_alone",
        "console/test_workspace.py::test_a_live_run_shows_what_its_nodes_use_now",
        *CHARTS,
    ),
    "cloudtrain/forecast/": (
        "forecast/test_oracle.py::test_real_allocations_are_within_5_percent",
        "forecast/test_oracle.py::test_the_oracle_still_counts_the_same[small 1x256, fsdp 8]",
        "forecast/test_oracle.py::test_the_oracle_still_counts_the_same[tiny 4x512, no, checkpointing]",
        "forecast/test_oracle.py::test_the_oracle_still_counts_the_same[tiny 4x512, bf16]",
        "forecast/test_layout_losses.py::test_auto_and_by_hand_have_the_same_losses",
    ),
    "cloudtrain/history/": (
        "laws/test_store_load.py::test_fifty_writers_at_once",
        "history/test_repair.py::test_drawn_damages_are_repaired",
        "history/test_labelled.py::test_sagemaker",
        "history/test_old_home.py::test_a_failed_run",
        "history/test_old_home.py::test_a_cancelled_run",
        "laws/test_store_load.py::test_killed_writers_leave_nothing_half_written[network]",
        "history/test_labelled.py::test_vertex",
        "history/test_old_home.py::test_a_preempted_run_goes_on_with_its_own_launcher",
        "history/test_old_home.py::test_a_finished_run_runs_again",
        "history/test_old_home.py::test_a_run_that_went_on_when_its_machine_died",
        "history/test_old_home.py::test_the_public_api",
        "laws/test_store_load.py::test_a_dozen_writers_at_once[network]",
        "laws/test_store_load.py::test_files_that_can_grow_no_further_lose_nothing",
    ),
    "cloudtrain/nodes/": LAB,
    "cloudtrain/runs/": (
        "runs/test_distributed_env.py::test_accelerates_own_tests_pass[test_sync-2]",
        "runs/test_faults.py::test_a_chain_whose_submitter_and_watchers_are_killed_runs_once",
        "runs/test_move.py::test_a_script_finds_what_it_saved_elsewhere[from SageMaker]",
        "runs/test_move.py::test_trained_on_several_platforms[sagemaker]",
        "runs/test_resume.py",
        "laws/test_law9_log.py::test_every_line_once_and_in_order",
        "laws/test_law3_commands.py::test_the_command_line_loses_answers",
        "runs/test_exactly_once.py::test_killed_at_some_steps[0]",
        "runs/test_move.py::test_a_script_finds_what_it_saved_elsewhere[from here]",
        "runs/test_watch_all.py::test_a_newer_cloudtrain_replaces_the_watcher_of_an_older_one",
        "runs/test_watch_all.py::test_after_a_take_over_the_next_shell_that_has_a_secret_hands_it_over",
        "runs/test_cap_histories.py::test_no_history_costs_more_than_its_cap[kubernetes]",
        "runs/test_cap_histories.py::test_no_history_costs_more_than_its_cap[slurm]",
    ),
    "cloudtrain/sweeps/": (
        "sweeps/test_sweep.py::test_kills_neither_lose_nor_double_a_trial[20]",
        "sweeps/test_sweep.py::test_kills_neither_lose_nor_double_a_trial[5]",
        "sweeps/test_sweep.py::test_the_watcher_starts_the_process_of_a_sweep_again",
        "sweeps/test_draw.py::test_tpe_finds_what_optuna_alone_finds",
        "sweeps/test_wandb.py::test_the_trial_is_in_wandb_config",
    ),
    "cloudtrain/testing/": (
        "test_plugin.py::test_it_passes_the_contract[rented_contract.py]",
        "testing/test_contract.py::test_a_mutant_against_the_whole_suite[cancel is ignored while QUEUED or STARTING]",
        "testing/test_contract.py::test_a_mutant_against_the_whole_suite[unknown is QUEUED]",
        "test_plugin.py::test_it_passes_the_contract[attic_contract.py]",
        "testing/test_contract.py::test_a_mutant_is_caught[cancel is ignored while QUEUED or STARTING]",
        "testing/test_contract.py::test_a_mutant_is_caught[stack loses all ranks but the first]",
        "testing/test_contract.py::test_a_mutant_is_caught[exec joins arguments in a shell]",
        "testing/test_contract.py::test_a_mutant_is_caught[the last lines are lost after a cancel]",
    ),
    "cloudtrain/training/": (
        "test_training.py::test_a_transformers_model_travels_without_a_pickle",
        "test_training.py::test_layers_of_a_language_model_are_split_and_its_data_is_an_address",
        "training/test_large_data.py::test_ranks_learn_from_mapped_data_and_single_samples_what_one_process_learns",
        "test_training.py::test_dictionaries_train_a_synthetic_model_and_hooks_are_heard",
        "test_training.py::test_the_first_failing_rank_is_shown_and_recovered_from",
        "entrypoints/trainer/test_pickled.py::test_a_package_of_the_users_that_is_called_trainer",
        "test_training.py::test_a_run_that_fails_after_a_checkpoint_resumes_by_default_and_learns_the_same",
        "test_training.py::test_any_module_is_sharded_and_learns_a_stream_with_all_that_the_loop_does",
        "training/test_large_data.py::test_neither_the_client_nor_a_rank_holds_a_copy",
        "test_training.py::test_three_nodes_learn_what_one_process_learns",
        "entrypoints/trainer/test_pickled.py::test_jobs_of_older_versions_name_another_path",
    ),
    "docs/how/evaluate.md": ("test_task_pages.py::test_a_model_is_trained_evaluated_tuned_and_compared",),
    "entrypoints/evaluate": (
        "entrypoints/test_evaluate_model.py::test_an_adapter_is_evaluated_over_its_model",
        "entrypoints/test_evaluate_model.py::test_loss_and_perplexity_are_those_of_transformers",
        "entrypoints/test_evaluate_model.py::test_what_cannot_be_evaluated_is_refused_in_one_sentence",
        "entrypoints/test_evaluate_model.py::test_a_local_task_of_the_harness_runs_without_network",
        "entrypoints/test_evaluate_model.py::test_a_classifier_has_loss_accuracy_and_f1",
    ),
    "entrypoints/launch": (
        *LAB,
        f"{STOPS}[kubernetes]",
        f"{THIRD_PARTY}[ddp_tutorial-nodes]",
        "entrypoints/launcher/output/test_storage.py",
        "entrypoints/launcher/prepare/test_requirements.py",
        "entrypoints/launcher/test_stall.py",
        "entrypoints/test_launch_nodes.py",
        "entrypoints/test_python_start.py::test_a_collective_as_the_last_statement",
        "laws/test_law6_failures.py::test_some_exit_codes_are_the_runs_own",
        "laws/test_law6_failures.py::test_every_deadly_signal_is_128_and_its_number",
        "laws/test_law8_world.py::test_as_many_gpus_must_be_visible[all]",
        "laws/test_law2_arguments.py::test_any_value_arrives_as_written[hydra-2]",
        "laws/test_law2_arguments.py::test_any_value_arrives_as_written[click-2]",
        "entrypoints/launcher/prepare/test_accelerate_config.py::test_the_variables_are_those_of_the_real_launch_command",
        "entrypoints/launcher/health/test_seeded.py::test_a_wrong_matrix_product_is_named",
        "entrypoints/launcher/test_parts.py::test_torch_listens_on_held_ports_forty_at_once",
        "laws/test_law6_failures.py::test_the_first_of_four_is_found_though_others_die_louder",
        "laws/test_law8_world.py::test_as_many_gpus_must_be_visible[None]",
        "laws/test_law2_arguments.py::test_any_value_arrives_as_written[argparse-2]",
    ),
    "entrypoints/launcher/restarts": ("entrypoints/launcher/test_killed_ranks.py::test_drawn_deaths[10]",),
    "entrypoints/launcher/world/frameworks": (f"{FRAMEWORKS}[local-jax]",),
    "entrypoints/path/": (
        ENGINE,
        "entrypoints/test_trainer_resume.py::test_a_damaged_and_an_unfinished_checkpoint_are_passed_over",
        "entrypoints/test_trainer_resume.py::test_a_killed_run_ends_as_the_unbroken_one[sft-2-1-0]",
        "thirdparty/test_recipes.py::test_a_killed_recipe_ends_as_the_unbroken_one[image_classification-2]",
    ),
    "entrypoints/train": (f"{THIRD_PARTY}[run_clm-one]",),
    "entrypoints/trainer/data/": (
        "entrypoints/trainer/data/test_token_cache.py::test_memory_does_not_grow_with_the_text",
        "entrypoints/test_train_world.py::test_held_out_samples_count_once_whatever_the_world[5]",
        "entrypoints/test_train_world.py::test_ddp_equals_one_process[45]",
        "entrypoints/trainer/data/test_own_task.py::test_two_ranks_give_the_numbers_of_one[ddp-dpo]",
        "entrypoints/trainer/data/test_own_task.py::test_two_ranks_give_the_numbers_of_one[ddp-own, on the meta device]",
        "entrypoints/trainer/data/test_own_task.py::test_two_ranks_give_the_numbers_of_one[fsdp-own, on the meta device]",
        "entrypoints/trainer/data/test_own_task_features.py::test_a_class_uses_everything_in_one_process_and_in_two[OwnCausal]",
        "entrypoints/trainer/data/test_own_task_features.py::test_a_class_uses_everything_in_one_process_and_in_two[OwnChat]",
        "entrypoints/trainer/data/test_own_task_features.py::test_a_class_uses_everything_in_one_process_and_in_two[OwnClasses]",
        "entrypoints/trainer/data/test_row_table.py::test_the_first_process_of_a_machine_reads_for_the_others[False]",
        "entrypoints/trainer/data/test_row_table.py::test_memory_does_not_grow_with_the_file[parquet]",
        "entrypoints/trainer/data/test_row_table.py::test_memory_does_not_grow_with_the_file[json]",
        "entrypoints/trainer/data/test_own_task_features.py::test_the_same_with_the_model_in_shards[OwnChat]",
        "entrypoints/trainer/data/test_own_task_features.py::test_a_class_uses_everything_in_one_process_and_in_two[OwnPairs]",
        "entrypoints/trainer/data/test_own_task.py::test_two_ranks_give_the_numbers_of_one[fsdp-dpo]",
        "entrypoints/test_train_world.py::test_held_out_samples_count_once_whatever_the_world[3]",
    ),
    "entrypoints/trainer/strategies/": (
        f"{STRATEGIES}/test_strategies.py::test_a_strategy_equals_one_process[fsdp x tp]",
        f"{STRATEGIES}/test_strategies.py::test_a_strategy_equals_one_process[dp x pp]",
        f"{STRATEGIES}/test_memory.py::test_no_rank_holds_the_whole_model[zero3]",
        f"{STRATEGIES}/test_memory.py::test_no_rank_holds_the_whole_model[fsdp, adapter of tied matrices merged]",
        f"{STRATEGIES}/test_dtype.py::test_weights_in_bfloat16_learn_as_on_one_process[lora, fsdp]",
        f"{STRATEGIES}/test_strategies_resume.py::test_another_layout_goes_on_within_a_tolerance[pp 2-read0]",
        f"{STRATEGIES}/test_strategies_resume.py::test_another_layout_goes_on_within_a_tolerance[ddp 3-read2]",
        f"{STRATEGIES}/test_strategies_resume.py::test_parts_on_the_disks_of_two_nodes_are_resumed_when_every_disk_has_all",
        "entrypoints/trainer/strategies/test_memory.py::test_no_rank_holds_the_whole_model[tp]",
        "entrypoints/trainer/strategies/test_strategies_resume.py::test_another_layout_goes_on_within_a_tolerance[fsdp 2-read1]",
        "entrypoints/trainer/strategies/test_strategies_resume.py::test_what_lies_in_parts_goes_on_to_the_bit[pp]",
    ),
    "cloudtrain/job/": ("job/test_typing.py::test_type_checkers_find_a_misspelt_key_and_a_wrong_type[_pyright]",),
    "cloudtrain/cli/": ("cli/test_ci.py::test_a_commit_is_trained_once_and_its_report_is_kept[gitlab]",),
    "entrypoints/trainer/": (
        "entrypoints/trainer/test_lora.py::test_an_adapter_learns_as_on_one_process[ddp]",
        "entrypoints/trainer/test_publish.py::test_the_model_is_uploaded_as_it_was_saved",
        "entrypoints/test_train_resume.py::test_three_ranks_sum_in_the_same_order_again",
        "entrypoints/test_train_resume.py::test_killed_and_started_again_is_exact[one process, workers, accumulation]",
        "entrypoints/test_train_features.py::test_compiled_and_with_activations_computed_again_the_losses_are_the_same",
        "entrypoints/test_own_strategies.py::test_a_script_runs_the_strategy_of_its_job[plain-fsdp]",
        "entrypoints/test_train_resume.py::test_a_finished_run_started_again_ends_at_once_with_the_same_model",
        "entrypoints/test_train_resume.py::test_a_torn_checkpoint_is_passed_over_for_the_one_before",
        "entrypoints/test_train_resume.py::test_asked_to_leave_it_saves_and_goes_on_exactly[2]",
        "entrypoints/trainer/test_lora.py::test_an_adapter_learns_as_on_one_process[fsdp]",
        "entrypoints/trainer/test_errors.py::test_a_diverged_training_ends_soon_and_publishes_nothing[1]",
        "entrypoints/trainer/test_in_memory_strategies.py::test_any_module_by_any_loss[zero1]",
        "entrypoints/trainer/test_in_memory_strategies.py::test_any_module_by_any_loss[zero3]",
        "entrypoints/test_train_features.py::test_it_ends_early_and_goes_back_to_the_best",
    ),
    "entrypoints/trainer/checkpoints/": (
        "entrypoints/trainer/checkpoints/test_two_starts.py::test_drawn_interleavings[20]",
        "entrypoints/trainer/checkpoints/test_epochs.py::test_a_replaced_start_uploads_and_removes_nothing",
        "entrypoints/trainer/checkpoints/test_kills.py::test_killed_at_random_times_it_loses_little_and_ends_the_same[a few]",
    ),
    "docs/how/own-task.md": ("test_task_pages.py::test_a_task_of_ones_own_is_trained_as_the_page_shows",),
    "docs/scripts.md": (
        "test_scripts_page.py::test_a_case_on_kubernetes[A script that takes a folder]",
        "test_scripts_page.py::test_a_case_on_kubernetes[A module]",
        "test_scripts_page.py::test_a_case_on_kubernetes[A shell text, with a set-up before it]",
        "test_scripts_page.py::test_a_case_on_vertex_local[A script that writes beside itself]",
        "test_scripts_page.py::test_a_case_on_kubernetes[A script that knows how to resume]",
        "test_scripts_page.py::test_a_case_on_kubernetes[A script that writes beside itself]",
        "test_scripts_page.py::test_a_case_on_vertex_local[A script that knows how to resume]",
        "test_scripts_page.py::test_a_case_on_this_machine[A command that starts its own ranks]",
    ),
    "tests/lab/": LAB,
    "cloudtrain/functions/": ("functions/test_function.py::test_a_group_continues_after_its_processes_were_killed",),
    "cloudtrain/report/": (
        *CHARTS,
        "report/test_importance.py::test_runs_without_a_value_do_not_count_and_few_runs_say_nothing",
    ),
    "examples/": (
        "test_examples.py::test_it_runs_as_written[grpo]",
        "test_examples.py::test_it_runs_as_written[classification]",
        "test_examples.py::test_it_runs_as_written[function]",
    ),
}


MOST = 3  # rows of the table whose tests together still run in six minutes

FIXED = (
    "backends/akash/test_backend.py::TestAkash::test_a_collective_over_two_nodes",
    "backends/kubernetes/test_jobset.py::TestJobSets::test_one_failing_node_ends_the_attempt",
    "backends/kubernetes/test_backend.py::TestKubernetes::test_the_time_limit_ends_the_attempt",
    f"{RESULTS}[slurm-loop-out]",
    "backends/sagemaker/test_backend.py::TestSagemaker::test_one_failing_node_ends_the_attempt",
    *(
        f"backends/{target}/test_backend.py::Test{target.title()}::{test}"
        for target in ("slurm", "ssh")
        for test in (
            "test_a_save_behind_a_shell_ends_before_the_attempt",
            "test_cancel_is_not_success_and_ends_everything",
            "test_every_line_once_and_in_order",
            "test_fetch_brings_what_the_script_wrote",
            "test_ranks_over_two_nodes",
            "test_submitting_a_plan_twice_is_one_attempt",
        )
    ),
    ENGINE,
    "laws/test_law6_failures.py::test_every_deadly_signal_is_128_and_its_number",
    "laws/test_law9_log.py::test_every_line_once_and_in_order",
    "backends/slurm/test_login.py::test_a_job_through_the_login_node",
    "backends/slurm/test_statuses.py::test_many_attempts_are_one_squeue",
    "backends/ssh/test_inside.py::test_a_server_in_a_rank_is_reached",
    "backends/ssh/test_statuses.py::test_a_machine_that_is_cut_off_keeps_nobody_waiting",
    "lab/test_lab.py::test_cut_and_healed",
    "nodes/test_ssh.py::test_a_cut_link_is_noticed_and_healed",
    "test_training.py::test_dictionaries_train_a_synthetic_model_and_hooks_are_heard",
    f"{STRATEGIES}/test_strategies.py::test_a_strategy_equals_one_process[fsdp x tp]",
)


class Sample(NamedTuple):
    """Names of tests of tier 3, as tests/tiers.txt has them: those to run and those that are left out."""

    chosen: list[str]
    left_out: list[str]


def long_tests(changed: list[str] | None) -> Sample:
    """Return the sample for files that differ; None where it is not known which do."""
    rows = [names for path, names in TABLE.items() if changed is None or _touches(changed, path, names)]
    touched = {name for names in rows for name in names}
    chosen = touched if len(rows) <= MOST else set(FIXED)
    return Sample(sorted(chosen), sorted(touched - chosen))


@cache
def sample() -> Sample:
    """Return the sample of this checkout."""
    return long_tests(changed_files(ROOT))


def changed_files(root: Path) -> list[str] | None:
    """Return the files that differ from the last landed commit; None where there is none to compare with."""
    base = _landed(root)
    if base is None:
        return None
    return [*_git(root, "diff", "--name-only", base), *_git(root, "ls-files", "--others", "--exclude-standard")]


def _landed(root: Path) -> str | None:
    head = _git(root, "rev-parse", "HEAD")
    for words in (
        ("rev-parse", "-q", "--verify", "origin/main"),
        ("rev-list", "-1", "--first-parent", "--before=1 day ago", "HEAD"),
    ):
        landed = _git(root, *words)
        if landed and landed != head:
            return landed[0]
    return None


def _git(root: Path, *words: str) -> list[str]:
    done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


def _touches(changed: list[str], path: str, tests: tuple[str, ...]) -> bool:
    files = {f"tests/{name.partition('::')[0]}" for name in tests}
    return any(file.startswith(path) or file in files for file in changed)
