"""torchrun: every rank is a process of its own that runs this script."""

import torch.distributed as dist
from handwritten import Loop
from workloads import WORKLOADS, Setting

dist.init_process_group("gloo")
Loop(Setting(WORKLOADS["tiny"].shortened(50), dist.get_world_size()), dist.get_rank()).epoch()
dist.barrier()
if dist.get_rank() == 0:
    print("first epoch done", flush=True)
dist.destroy_process_group()
