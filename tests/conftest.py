"""One thread: tiny models gain nothing from more, and lose much where other work runs beside."""

import torch

torch.set_num_threads(1)
