"""Keys and values of results, operator configs and `info`. Imports no framework. Both."""

# Keys of result dictionaries.
NUM_SAMPLES = "num_samples"
BATCH_COUNT = "batch_count"

# What becomes of a batch (`trainer.batch_mode`): divided into parts, divided by the framework, or one on each worker.
PARTS, GLOBAL, PER_WORKER = "parts", "global", "per_worker"

# Attribute of a metric: its weight. The loss of the default methods has it, and stays a tensor for code that reads it.
WEIGHT = "_raysgd_weight"

# Key of the operator's config: the batch size of all workers together. Each worker gets its part of it.
BATCH_SIZE = "*batch_size"

# Keys of the `info` dictionary that a training step receives.
USE_FP16 = "__use_fp16__"
NUM_STEPS = "__num_steps__"

# A name of RaySGD, for scripts that import it. raysgd does not use it.
SCHEDULER_STEP = "scheduler_step"

# Values of the argument `scheduler_step_freq`: when learning rate schedulers step. With "manual", the user's code does it.
SCHEDULER_STEP_BATCH = "batch"
SCHEDULER_STEP_EPOCH = "epoch"
SCHEDULER_STEP_MANUAL = "manual"
SCHEDULER_STEP_STEP = "step"  # not one of RaySGD's, which the next line has
VALID_SCHEDULER_STEP = frozenset({SCHEDULER_STEP_BATCH, SCHEDULER_STEP_EPOCH, SCHEDULER_STEP_MANUAL})
STEPPED_BY_TRAINER = frozenset({SCHEDULER_STEP_BATCH, SCHEDULER_STEP_STEP, SCHEDULER_STEP_EPOCH})
