"""After AWS' scikit-learn example: all files of a channel, no default for the folders but the environment's."""

import argparse
import os

parser = argparse.ArgumentParser()
parser.add_argument("--max_leaf_nodes", type=int, default=-1)
parser.add_argument("--output-data-dir", type=str, default=os.environ["SM_OUTPUT_DATA_DIR"])
parser.add_argument("--model-dir", type=str, default=os.environ["SM_MODEL_DIR"])
parser.add_argument("--train", type=str, default=os.environ["SM_CHANNEL_TRAIN"])
args = parser.parse_args()
input_files = [os.path.join(args.train, file) for file in os.listdir(args.train)]
if len(input_files) == 0:
    raise ValueError(f"There are no files in {args.train}.")
rows = [line.split(",") for file in input_files for line in open(file)]  # noqa: SIM115
with open(os.path.join(args.model_dir, "model.bin"), "w") as model:
    model.write(f"{args.max_leaf_nodes} {len(rows)}")
print("accuracy: 0.93")
