import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
print(parser.parse_args())
