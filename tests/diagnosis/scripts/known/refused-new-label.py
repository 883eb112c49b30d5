import runpy
import sys

# The rows of the evaluation have a label that the model never sees.
flags = "--task sequence-classification --dataset data.jsonl --model_type bert --tokenizer bpe:300 --num_hidden_layers 1 --eval_dataset eval.jsonl --eval_strategy epoch"
sys.argv = ["train.py", *flags.split()]
sys.path.insert(0, ".cloudtrain")
runpy.run_path(".cloudtrain/train.py", run_name="__main__")
