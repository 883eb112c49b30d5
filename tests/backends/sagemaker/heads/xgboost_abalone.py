"""After AWS' XGBoost script mode: os.environ.get for some, hyperparameters with their own names."""

import argparse
import json
import os

parser = argparse.ArgumentParser()
parser.add_argument("--max_depth", type=int)
parser.add_argument("--eta", type=float)
parser.add_argument("--objective", type=str)
parser.add_argument("--num_round", type=int)
parser.add_argument("--model_dir", type=str, default=os.environ.get("SM_MODEL_DIR"))
parser.add_argument("--train", type=str, default=os.environ.get("SM_CHANNEL_TRAIN"))
parser.add_argument("--validation", type=str, default=os.environ.get("SM_CHANNEL_TEST"))
parser.add_argument("--sm_hosts", type=str, default=os.environ.get("SM_HOSTS"))
parser.add_argument("--sm_current_host", type=str, default=os.environ.get("SM_CURRENT_HOST"))
args, _ = parser.parse_known_args()
sm_hosts = json.loads(args.sm_hosts)
if len(sm_hosts) > 1:
    raise SystemExit("one host was asked for")
assert args.sm_current_host == sm_hosts[0] and os.path.isdir(args.validation)
with open(os.path.join(args.model_dir, "model.bin"), "w") as model:
    json.dump({"max_depth": args.max_depth, "eta": args.eta, "objective": args.objective}, model)
print("[0]\ttrain-rmse:8.25\tvalidation-rmse:8.50")
