"""What a commit costs per step, under a Hugging Face Trainer and under Lightning's, by reference and as a copy.

This process trains a Llama with AdamW on batches of one short text. CPU time is that of the process: on a machine with other work, the
wall time says little. A copy of 250 million parameters takes 10 GB of memory.

    python examples/benchmarks/commits.py --sizes 20 250
"""

import argparse
import gc
import tempfile
import time
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from report import claim_stdout, emit, spread

from raysgd.train.elastic_state import ElasticState

COLUMNS = ("trainer", "commit", "parameters_million", "state_mb", "cpu_ms", "wall_ms", "step_cpu_ms")
WIDTHS = {1: (64, 128, 1), 20: (512, 1376, 6), 250: (1024, 4096, 15)}  # of a size: hidden, intermediate, layers
WORDS, LENGTH = 1000, 8


class Copied(torch.optim.AdamW):
    """Has an `eval` method, as schedule-free optimizers have, so that each commit is a copy."""

    def eval(self) -> None: ...

    def train(self) -> None: ...


def make_model(size: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, layers = WIDTHS[size]
    torch.manual_seed(0)
    shape = {"vocab_size": WORDS, "hidden_size": hidden, "intermediate_size": intermediate}
    return LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=layers, num_attention_heads=8))


def make_texts(count: int) -> list[dict[str, Any]]:
    return [{"input_ids": words, "labels": words} for words in torch.randint(0, WORDS, (count, LENGTH))]


def train_transformers(optimizer: Any, config: dict[str, Any]) -> Any:
    import transformers

    from raysgd.train.huggingface.transformers import prepare_trainer

    quiet = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    args = transformers.TrainingArguments(
        tempfile.gettempdir(), per_device_train_batch_size=1, max_steps=config["steps"], **quiet
    )
    trainer = transformers.Trainer(
        make_model(config["size"]),
        args,
        train_dataset=make_texts(config["steps"]),
        optimizer_cls_and_kwargs=(optimizer, {"lr": 1e-4}),
    )
    prepare_trainer(trainer).train()
    return trainer.model, trainer.optimizer.optimizer


def train_lightning(config: dict[str, Any]) -> Any:
    import lightning.pytorch as pl

    from raysgd.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(config["size"])

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    strategy = {"strategy": RayDDPStrategy(), "plugins": [RayLightningEnvironment()]}
    trainer = prepare_trainer(pl.Trainer(max_steps=config["steps"], accelerator="cpu", devices=1, **strategy, **quiet))
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(make_texts(config["steps"]), batch_size=1))
    return module, trainer.optimizers[0]


CASES = {
    ("transformers", "by reference"): partial(train_transformers, torch.optim.AdamW),
    ("transformers", "copy"): partial(train_transformers, Copied),
    ("Lightning", "copy"): train_lightning,
}


def measured(config: dict[str, Any]) -> dict[str, Any]:
    """Train, and return what the commits of each step took. The first two steps do not count: they allocate."""
    spent: list[tuple[float, float]] = []
    steps: list[float] = []
    own = {name: getattr(ElasticState, name) for name in ("commit", "commit_step")}

    def timed(name: str, state: ElasticState) -> None:
        if name == "commit":  # a step begins
            steps.append(time.process_time())
            spent.append((0.0, 0.0))
        wall, cpu = time.perf_counter(), time.process_time()
        own[name](state)
        before = spent[-1]
        spent[-1] = before[0] + time.perf_counter() - wall, before[1] + time.process_time() - cpu

    for name in own:
        setattr(ElasticState, name, lambda state, name=name: timed(name, state))
    try:
        model, optimizer = CASES[config["trainer"], config["commit"]](config)
    finally:
        for name, method in own.items():
            setattr(ElasticState, name, method)
    parameters = sum(each.numel() for each in model.parameters())
    states = sum(each.numel() for kept in optimizer.state.values() for each in kept.values())
    return {
        "parameters_million": round(parameters / 1e6, 1),
        "state_mb": round((parameters + states) * 4 / 1e6),
        "cpu_ms": spread([1e3 * cpu for _, cpu in spent[2:]]),
        "wall_ms": spread([1e3 * wall for wall, _ in spent[2:]]),
        "step_cpu_ms": spread([1e3 * (after - before) for before, after in pairwise(steps[2:])]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", choices=WIDTHS, default=[20], help="millions of parameters")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    args = parser.parse_args()
    out = claim_stdout()
    rows = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # as raysgd does in a worker
    for size in [1] if args.smoke else args.sizes:
        for name, commit in CASES:
            config = {"trainer": name, "commit": commit, "size": size, "steps": args.steps}
            rows.append({"trainer": name, "commit": commit, **measured(config)})
            gc.collect()  # the model of a Trainer, which is in a circle
    dist.destroy_process_group()
    emit(out, "commits", vars(args), rows, COLUMNS)


if __name__ == "__main__":
    main()
