"""After AWS' pytorch_mnist: options with dashes, the hosts as JSON."""

import argparse
import json
import os

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64, metavar="N")
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
with open(os.path.join(args.data_dir, "a.csv")) as data, open(os.path.join(args.model_dir, "model.bin"), "w") as model:
    model.write(data.read())
