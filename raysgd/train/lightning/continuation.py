"""A Lightning fit that continues with the next batch when workers fail or join. Worker."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from raysgd.core.decisions.sampling_plan import SamplingPlan
from raysgd.errors import ConfigError
from raysgd.torch.data.loading import LoaderIterator
from raysgd.torch.foreign import loader_with
from raysgd.train.elastic_state import ByReference, elastic
from raysgd.train.in_place.generators import generator_states, set_generators
from raysgd.train.lightning.foreign import FitState, Logs, refused, replace_files
from raysgd.train.lightning.package import imported
from raysgd.train.sessions import Session

COMMIT = "raysgd's last commit"  # Lightning shows it as the path of a checkpoint
REFUSED = {  # callbacks, each with the reason and what to do instead
    "StochasticWeightAveraging": (
        "which Lightning resumes only between epochs",
        "use EMAWeightAveraging (2.6 or newer)",
    ),
    "LearningRateFinder": ("which trains before the fit", "find the rate in a script of its own"),
    "ModelPruning": ("which replaces parameters", "prune before or after the fit"),
    "OnExceptionCheckpoint": ("which saves a file at each worker failure", "leave it out"),
    "SpikeDetection": ("whose state Lightning cannot load", "look at the loss in a callback of your own"),
}


class Continuation:
    """Owns the commits of one fit, which are Lightning's checkpoints, kept in memory.

    A commit is made before a batch, `every` so many batches, if no gradients are accumulated. A fit
    that finds one resumes from it as from a checkpoint's file.
    """

    def __init__(self, trainer: Any, session: Session, every: int) -> None:
        if every < 1:
            raise ConfigError(f"commit_every must be a whole number of at least 1, got {every!r}")
        if trainer.reload_dataloaders_every_n_epochs:
            raise refused("reload_dataloaders_every_n_epochs", "let one data set give other samples in each epoch")
        self.trainer, self._session, self._every = trainer, session, every
        self.rank_info = session.rank_info
        self._batches = every  # since the last commit
        self.committing, self.checkpoint = False, dict[str, Any]()
        self.weight = 1.0  # of the mean loss of this rank's part of the batch
        self._loader: DividedLoader | None = None
        self._commit: dict[str, Any] = {}  # the commit from which the fit has not resumed yet
        self._rest = FitState(trainer, says=session.rank_info.world_rank == 0 and session.attempt.number < 2)
        self._logs = Logs(trainer)
        versions = trainer.strategy.broadcast(self._logs.versions)
        self._state = elastic({"trainer": self, "workers": session.planned_ranks, "versions": versions})
        self._logs.continue_in(self._state["versions"], resumes=bool(self._commit))
        self._sanity_steps = trainer.num_sanity_val_steps
        self.saved: list[str] = []  # files of checkpoints, since the last commit
        if self._commit:
            trainer.ckpt_path, trainer.num_sanity_val_steps = COMMIT, 0
            self.saved = self._commit["saved"].content
            replace_files(trainer, self.saved)

    # -- commits ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._loader is None:
            return {}
        self.committing = True
        try:
            self.trainer.save_checkpoint(COMMIT, weights_only=False)
        finally:
            self.committing = False
        rest = self._rest.keep(self.checkpoint["state_dict"])
        measured: list[Any] = [self._rest.measured()]
        if self.rank_info.world_size > 1:  # a worker that fails takes its own along
            measured *= self.rank_info.world_size
            dist.all_gather_object(measured, measured[0])
        self.saved = []
        checkpoint = {**self.checkpoint, "optimizer_states": [], "lr_schedulers": [], "loops": None}
        by_reference = {"saved": self.saved, "random": generator_states(), "points": self._logs.points.committed}
        return {
            **{"checkpoint": checkpoint, "rest": rest, "measured": measured},
            **{name: ByReference(each) for name, each in by_reference.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._commit = state

    def resumed(self, path: Any) -> dict[str, Any] | None:
        """The commit that Lightning is to load, or None to load `path`."""
        if not self._commit or not (self.trainer.training or path == COMMIT):
            return None
        if self.trainer.training:
            self.trainer.ckpt_path = None
        return copy.deepcopy(self._commit["checkpoint"])  # type: ignore[no-any-return]

    def begin(self) -> bool:
        """Begin in the epoch of the commit, if the fit resumes from one."""
        if self._commit:
            self._rest.begin_in_epoch(self._commit["rest"])
        return bool(self._commit)

    def put_back(self) -> None:
        """Put the objects into the state of the commit, if the fit resumes from one: Lightning's
        own resume leaves out what hooks have set. This is done at the first batch, because hooks of
        the fit's start act on new objects in each attempt."""
        if self._commit:
            self._rest.put_back(self._commit["rest"])
            self._rest.share_measured(self._commit["measured"], first=self.rank_info.world_rank == 0)

    def begin_batch(self) -> None:
        """Leave a batch out of means over the epoch if its samples are another rank's."""
        if not self.weight:
            self._rest.leave_out_batch()

    # -- the fit ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ConfigError if the module cannot resume from a commit, or warn if its steps will be
        others."""
        module = self.trainer.lightning_module
        if not module.automatic_optimization:
            raise refused("manual optimization", "use automatic_optimization with one optimizer")
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            raise refused("training_step(dataloader_iter)", "define training_step(batch, batch_idx)")
        if any(hasattr(each, "consolidate_state_dict") for each in self.trainer.optimizers):
            raise refused("an optimizer whose state is sharded", "use one that has all of its state on each rank")
        known = {id(each) for each in module.parameters()}
        groups = [group for each in self.trainer.optimizers for group in each.param_groups]
        if any(id(each) not in known for group in groups for each in group["params"]):
            raise refused("an optimizer of parameters that are not the module's", "make them a part of the module")
        for each in self.trainer.callbacks:
            for name, (reason, instead) in REFUSED.items():
                if isinstance(each, getattr(imported(".callbacks"), name, ())):
                    raise refused(f"{name}, {reason}", instead)
            if getattr(each, "save_on_exception", False):
                raise refused(
                    "ModelCheckpoint(save_on_exception=True)", "leave that out: raysgd continues after a failure"
                )
        if not hasattr(self.trainer, "val_check_interval"):
            raise refused("val_check_interval as a time", "give a number of batches, or a part of an epoch")
        if getattr(self.trainer.precision_plugin, "scaler", None) is not None:
            feature = "precision='16-mixed', because with fewer workers other steps would overflow"
            raise refused(feature, "use 'bf16-mixed' or '32-true'")

    def divided(self, loader: Any) -> DividedLoader:
        """The loader of this rank's part of each step."""
        if self._loader is not None:
            raise refused("several train loaders or a second fit", "join the data sets, and call fit once")
        usual = isinstance(loader, DataLoader) and type(loader.sampler) is DistributedSampler
        if not usual or type(loader.batch_sampler) is not BatchSampler or hasattr(loader, "state_dict"):
            raise refused(
                "this train loader",
                "use a torch DataLoader of a map-style dataset with batch_size, without a sampler of your own",
            )
        self._loader = DividedLoader(loader, self, workers=self._state["workers"])
        self._session.at_end.callback(self._loader.close)
        return self._loader

    def before(self, batch: int) -> None:
        """Commit before batch number `batch` of the epoch, if it is time for it. The first one
        after a resume is that of the last commit: another would let raysgd forget which reports are
        repeated."""
        if self._commit:
            self._logs.points.resume(self._commit["points"].content)
            set_generators(self._commit["random"].content)
            self.trainer.num_sanity_val_steps = self._sanity_steps
            self._commit, self._batches = {}, 0
        elif self._batches >= self._every and batch % self.trainer.accumulate_grad_batches == 0:
            self._logs.points.commit(self._state.commit)
            self._batches = 0
        self._batches += 1


class DividedLoader:
    """Gives this rank's part of each step, beginning with the batch at which Lightning's loop is.

    A step has the samples that the workers of the first attempt would take in it, so there are
    always as many steps in an epoch, and Lightning's counters stay right. Lightning's sampler says
    their order. A rank has one part of each step, larger if there are fewer ranks, because a module
    can count in its attributes how often `training_step` was called.
    """

    def __init__(self, loader: DataLoader[Any], fit: Continuation, *, workers: int) -> None:
        assert isinstance(loader.sampler, DistributedSampler) and loader.batch_size is not None
        self.sampler: DistributedSampler[Any] = DistributedSampler(
            loader.dataset, num_replicas=1, rank=0, shuffle=loader.sampler.shuffle, seed=loader.sampler.seed
        )
        ranks, self._fit = fit.rank_info.world_size, fit
        self._plan = SamplingPlan(len(self.sampler), loader.batch_size * workers, ranks, ranks, loader.drop_last)
        self._mine: list[list[int]] = []
        self.loader = loader_with(loader, sampler=self.sampler, batch_sampler=self._mine)
        self.worker_init_fn = loader.worker_init_fn  # Lightning may set it
        self._batches: LoaderIterator | None = None

    def __len__(self) -> int:
        return self._plan.steps_left(0)

    def __iter__(self) -> Iterator[Any]:
        self._fit.put_back()
        order, first = self._order(), self._fit.trainer.fit_loop.batch_idx + 1
        parts = [part for _, part in self._plan.parts_of(self._fit.rank_info.world_rank, first * self._plan.step_size)]
        self._mine[:] = [order[part.start : part.stop] for part in parts]
        self.loader.worker_init_fn = self.worker_init_fn
        self._batches = LoaderIterator(self.loader)
        for batch, part in enumerate(parts, start=first):
            self._fit.before(batch)
            loaded = next(self._batches)
            self._fit.weight = part.weight
            yield loaded

    def _order(self) -> list[int]:
        """The epoch's order, of which each rank has its samples of a step in one piece. Lightning's
        sampler deals them in turn."""
        order, size, ranks = list(self.sampler), self._plan.step_size, self._plan.world_size
        steps = [order[start : start + size] for start in range(0, len(order), size)]
        return [sample for step in steps for rank in range(ranks) for sample in step[rank::ranks]]

    def close(self) -> None:
        """End the loader's processes."""
        if self._batches is not None:
            self._batches.close()

    def __getattr__(self, name: str) -> Any:
        """Read an attribute of the user's loader, such as `dataset`."""
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)
