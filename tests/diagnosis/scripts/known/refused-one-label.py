import runpy
import sys

# All rows have the same label.
flags = "--task sequence-classification --dataset data.jsonl --model_type bert --tokenizer bpe:300 --num_hidden_layers 1"
sys.argv = ["train.py", *flags.split()]
sys.path.insert(0, ".cloudtrain")
runpy.run_path(".cloudtrain/train.py", run_name="__main__")
