# train a miniature character-level model, for a CPU

eval_interval = 200
eval_iters = 2
log_interval = 1
always_save_checkpoint = True

dataset = "data"
gradient_accumulation_steps = 2
batch_size = 8
block_size = 32

n_layer = 2
n_head = 2
n_embd = 32

learning_rate = 1e-2
max_iters = 600
