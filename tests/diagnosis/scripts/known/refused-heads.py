import runpy
import sys

# The width cannot be divided among the heads.
flags = "--dataset data.txt --model_type llama --tokenizer bpe:300 --num_hidden_layers 1 --hidden_size 30 --num_attention_heads 4"
sys.argv = ["train.py", *flags.split()]
sys.path.insert(0, ".cloudtrain")
runpy.run_path(".cloudtrain/train.py", run_name="__main__")
