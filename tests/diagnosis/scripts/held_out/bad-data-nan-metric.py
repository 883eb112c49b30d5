print("{'eval_nan_ratio': 0.0, 'eval_f1': nan, 'epoch': 1.0}")
print("metric names: loss, nan_ratio, perplexity")
batch = {"input_ids": [1, 2], "attention_mask": [1, 1]}
print(batch["labels"])
