"""Where there is no GPU, its kernels run in Triton's interpreter, which must be said before their import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
