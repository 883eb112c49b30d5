"""Whether 60 popular models fit on one GPU, and how many published trainings take as long as forecast.

    python benchmarks/fits.py

Nothing is measured: it prints what `cloudtrain fit` says of a script (batch 1, 2048 tokens, bf16, checkpointing, AdamW),
trained whole, with LoRA and with QLoRA, and compares forecasts with the trainings of docs/published.csv.
"""

from __future__ import annotations

import sys

from measure import ROOT, report, table

from cloudtrain.forecast import fit, training
from cloudtrain.job.job import Job

sys.path.insert(0, str(ROOT / "docs"))
from published import compared

GPU, LEAST = "A100-80GB", 55
WAYS = {"full": {}, "LoRA": {"lora": 16}, "QLoRA": {"lora": 16, "quantized": "4bit"}}
NAMES = (  # noqa: SIM905 - a list of 60 lines says no more
    "meta-llama/Llama-2-7b-hf meta-llama/Llama-2-13b-hf meta-llama/Llama-2-70b-hf meta-llama/Meta-Llama-3-8B "
    "meta-llama/Meta-Llama-3-70B meta-llama/Llama-3.1-8B-Instruct meta-llama/Llama-3.1-70B-Instruct "
    "meta-llama/Llama-3.1-405B meta-llama/Llama-3.2-1B meta-llama/Llama-3.2-3B-Instruct "
    "meta-llama/Llama-3.3-70B-Instruct codellama/CodeLlama-7b-hf codellama/CodeLlama-34b-hf TinyLlama/TinyLlama-1.1B-Chat-v1.0 "
    "mistralai/Mistral-7B-v0.1 mistralai/Mistral-7B-Instruct-v0.2 mistralai/Mistral-7B-Instruct-v0.3 "
    "mistralai/Mixtral-8x7B-v0.1 mistralai/Mixtral-8x22B-v0.1 mistralai/Mistral-Large-Instruct-2407 "
    "Qwen/Qwen2.5-0.5B Qwen/Qwen2.5-1.5B-Instruct Qwen/Qwen2.5-3B Qwen/Qwen2.5-7B-Instruct Qwen/Qwen2.5-14B "
    "Qwen/Qwen2.5-32B Qwen/Qwen2.5-72B-Instruct Qwen/Qwen2.5-Coder-7B Qwen/QwQ-32B Qwen/Qwen3-0.6B Qwen/Qwen3-1.7B "
    "Qwen/Qwen3-4B Qwen/Qwen3-8B Qwen/Qwen3-14B Qwen/Qwen3-32B Qwen/Qwen3-30B-A3B Qwen/Qwen3-235B-A22B "
    "google/gemma-2b google/gemma-7b-it google/gemma-2-2b google/gemma-2-9b-it google/gemma-2-27b google/gemma-3-1b-it "
    "google/gemma-3-4b-it google/gemma-3-12b-it google/gemma-3-27b-it microsoft/phi-2 microsoft/phi-1_5 "
    "microsoft/Phi-3-mini-4k-instruct microsoft/phi-4 tiiuae/falcon-7b tiiuae/falcon-40b EleutherAI/pythia-1b "
    "EleutherAI/pythia-6.9b EleutherAI/pythia-12b gpt2 openai-community/gpt2-xl allenai/OLMo-2-1124-7B "
    "google-bert/bert-base-uncased HuggingFaceTB/SmolLM2-1.7B"
).split()


def said(name: str, way: str) -> str:
    """Return the answer and the band in GiB for a model, or why there is none."""
    fields = {"model": name, "batch": 1, "sequence": 2048, "checkpointing": True, **WAYS[way]}
    job = Job(name="s", source="/", entrypoint="t.py", resources={"accelerators": f"{GPU}:1"}, fit=fields)
    found = training.of_job(job, job.parallelism.model_dump(mode="json"), 1, 1)
    if found is None or isinstance(found, str):
        return "unknown"
    answer = fit.answer(found, GPU)
    return f"{answer.answer}, {answer.low / fit.GIB:.0f} to {answer.high / fit.GIB:.0f} GiB"


def main() -> int:
    rows = [(name, *(said(name, way) for way in WAYS)) for name in NAMES]
    known = sum("unknown" not in row for row in rows)
    body = table(rows, ["model", *WAYS]) + f"\n\n{known} of {len(rows)} have an answer for each, on one {GPU}.\n\n"
    gates = [("models without an answer", float(len(rows) - known), float(len(rows) - LEAST))]
    trained = []
    for apart, name in ((False, "published trainings"), (True, "those kept apart")):
        found = [each for each in compared() if each.apart == apart]
        outside = sum(not each.inside for each in found)
        faster = sum(each.over.middle < 1 for each in found)
        trained.append((name, str(len(found)), str(len(found) - outside), str(faster), str(len(found) - faster)))
        gates.append((f"{name}, share outside p10 to p90", outside / len(found), 0.2))
        if not apart:
            gates.append(
                (
                    f"{name}, the more frequent of faster and slower to the other",
                    max(len(found) / faster - 1, faster / (len(found) - faster)),
                    2.0,
                )
            )
    body += table(trained, ["trainings", "all", "inside p10 to p90", "faster than the middle", "slower"])
    return report("fits", "Popular models on one GPU, and published trainings", body, gates)


if __name__ == "__main__":
    sys.exit(main())
