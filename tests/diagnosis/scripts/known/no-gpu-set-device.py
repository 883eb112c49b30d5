import os

import torch

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
