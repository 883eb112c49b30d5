"""After AWS' pytorch_mnist: options with dashes, the hosts as JSON, a checkpoint after each epoch as for spot."""

import argparse
import json
import os
import time

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64, metavar="N")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--checkpoint-path", type=str, default="/opt/ml/checkpoints")
parser.add_argument("--lr", type=float, default=0.01, metavar="LR")
parser.add_argument("--backend", type=str, default=None)
parser.add_argument("--hosts", type=list, default=json.loads(os.environ["SM_HOSTS"]))
parser.add_argument("--current-host", type=str, default=os.environ["SM_CURRENT_HOST"])
parser.add_argument("--model-dir", type=str, default=os.environ["SM_MODEL_DIR"])
parser.add_argument("--data-dir", type=str, default=os.environ["SM_CHANNEL_TRAIN"])
parser.add_argument("--num-gpus", type=int, default=os.environ["SM_NUM_GPUS"])
args = parser.parse_args()
is_distributed = len(args.hosts) > 1 and args.backend is not None
host_rank = args.hosts.index(args.current_host)
assert (is_distributed, host_rank, args.batch_size, args.lr) == (False, 0, 128, 0.05), args
checkpoint, start = os.path.join(args.checkpoint_path, "checkpoint.json"), 1
if os.path.isfile(checkpoint):
    with open(checkpoint) as file:
        start = json.load(file)["epoch"] + 1
    print(f"Loaded the checkpoint of epoch {start - 1}", flush=True)
for epoch in range(start, args.epochs + 1):
    if epoch > start:
        time.sleep(float(os.environ.get("EPOCH_SECONDS", "0")))
    print(f"Train Epoch: {epoch} [128/128 (100%)]\tLoss: {1 / epoch:.6f}", flush=True)
    with open(checkpoint, "w") as file:
        json.dump({"epoch": epoch}, file)
with open(os.path.join(args.data_dir, "a.csv")) as data, open(os.path.join(args.model_dir, "model.bin"), "w") as model:
    model.write(data.read())
