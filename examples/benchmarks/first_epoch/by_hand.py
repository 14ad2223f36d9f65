"""The hand-written loop in Ray actors."""

import ray
from handwritten import HandWritten
from workloads import WORKLOADS, Setting

ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
ranks = HandWritten(Setting(WORKLOADS["tiny"].shortened(50), 2))
ranks.epoch()
print("first epoch done", flush=True)
ranks.stop()
