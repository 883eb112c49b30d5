"""After Hugging Face's notebook of text classification with the Trainer: every folder is an option with an SM_ default."""

import argparse
import os

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--train_batch_size", type=int, default=32)
parser.add_argument("--model_name", type=str)
parser.add_argument("--learning_rate", type=str, default=5e-5)
parser.add_argument("--output_data_dir", type=str, default=os.environ["SM_OUTPUT_DATA_DIR"])
parser.add_argument("--model_dir", type=str, default=os.environ["SM_MODEL_DIR"])
parser.add_argument("--n_gpus", type=str, default=os.environ["SM_NUM_GPUS"])
parser.add_argument("--training_dir", type=str, default=os.environ["SM_CHANNEL_TRAIN"])
parser.add_argument("--test_dir", type=str, default=os.environ["SM_CHANNEL_TEST"])
args, _ = parser.parse_known_args()
assert os.listdir(args.training_dir) == ["a.csv"] and os.listdir(args.test_dir) == ["one.csv"], args
assert (args.epochs, args.model_name, float(args.learning_rate)) == (1, "distilbert-base-uncased", 5e-5)
with open(os.path.join(args.output_data_dir, "eval_results.txt"), "w") as writer:
    writer.write(f"gpus = {int(args.n_gpus)}\n")
with open(os.path.join(args.model_dir, "model.bin"), "w") as writer:
    writer.write(args.model_name)
print({"loss": 0.5, "learning_rate": 2.5e-05, "epoch": 1.0})
