"""torchrun: every rank is a process of its own that runs this script."""

import torch.distributed as dist
from handwritten import Loop
from workloads import WORKLOADS

dist.init_process_group("gloo")
Loop(WORKLOADS["tiny"].shortened(50), dist.get_rank(), dist.get_world_size()).epoch()
dist.barrier()
if dist.get_rank() == 0:
    print("first epoch done", flush=True)
dist.destroy_process_group()
