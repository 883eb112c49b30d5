"""After AWS' TensorFlow 2 script: --model_dir is another thing than --sm-model-dir, and a host saves alone."""

import argparse
import json
import os


def _parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_dir", type=str)
    parser.add_argument("--sm-model-dir", type=str, default=os.environ.get("SM_MODEL_DIR"))
    parser.add_argument("--train", type=str, default=os.environ.get("SM_CHANNEL_TRAIN"))
    parser.add_argument("--hosts", type=list, default=json.loads(os.environ.get("SM_HOSTS")))
    parser.add_argument("--current-host", type=str, default=os.environ.get("SM_CURRENT_HOST"))
    return parser.parse_known_args()


if __name__ == "__main__":
    args, unknown = _parse_args()
    assert os.path.exists(os.path.join(args.train, "a.csv"))
    if args.current_host == args.hosts[0]:
        os.makedirs(os.path.join(args.sm_model_dir, "000000001"), exist_ok=True)
        with open(os.path.join(args.sm_model_dir, "model.bin"), "w") as model:
            model.write("saved_model")
        print("1/1 - 0s - loss: 0.5000 - accuracy: 0.9000")
