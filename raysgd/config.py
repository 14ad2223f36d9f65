"""Settings that the user passes, and limits derived from them: frozen, and checked. Both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from raysgd.errors import ConfigError, shown, suggesting_fields

T = TypeVar("T")

# A process group forms, and a machine answers, within seconds or not at all: a longer wait means a wrong address or a
# firewall.
JOIN_AT_MOST_S = 60.0
UNREACHABLE_AT_MOST_S = 60.0
ORPHAN_S = 600.0  # how long the workers of a trainer with a name wait for a script
SILENT_AT_LEAST_S = 10.0  # an import can block all threads of its process for a while


def is_real(value: Any) -> bool:
    """Whether a value is an int or a float. Booleans are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def at_least(name: str, value: Any, least: float, *, whole: bool = False) -> None:
    """Raise ConfigError unless the value is a number (a whole number) of at least `least`."""
    if not is_real(value) or (whole and not isinstance(value, int)) or not value >= least:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"{name} must be {kind} of at least {least}, got {value!r}")


def above_0(name: str, seconds: Any) -> None:
    if not is_real(seconds) or seconds <= 0:
        raise ConfigError(f"{name} must be a number of seconds above 0, got {seconds!r}")


def one_of(name: str, value: Any, *allowed: Any) -> None:
    if value not in allowed:
        *others, last = map(repr, allowed)
        raise ConfigError(f"{name} must be {', '.join(others)} or {last}, got {value!r}")


def object_of(kind: type[T], name: str, value: Any) -> T | None:
    """Check that an argument is None or an object of this class of raysgd. Raise ConfigError for
    others."""
    if value is None or isinstance(value, kind):
        return value
    kind_name = kind.__name__
    raise ConfigError(f"{name} must be a raysgd.{kind_name}, got {shown(value)}: pass an object, {kind_name}(...)")


def check_flags(**flags: Any) -> None:
    """Raise ConfigError for arguments that must be True or False and are something else."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False, got {value!r}")


# Settings that exclude each other, each with the values that do (or a function that says whether a value does), and why.
Exclusions = Sequence[tuple[Mapping[str, Callable[[Any], bool] | Sequence[Any]], str]]


def refuse(excluded: Exclusions, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first settings that exclude each other."""
    for values, why in excluded:
        choices = {name: settings[name] for name in values}
        if all(wrong(choices[name]) if callable(wrong) else choices[name] in wrong for name, wrong in values.items()):
            named = " and ".join(f"{name}={value!r}" for name, value in choices.items())
            raise ConfigError(f"{named} cannot be combined: {why}")


@dataclass(frozen=True)
class Limits:
    """The limit of every wait, in seconds, derived from two arguments: `timeout_s` and
    `hang_timeout_s`.

    start_s        until the cluster has room for the first workers
    setup_s        for the operator's `setup`
    join_s         for the ranks of a generation to form a process group
    collective_s   for one collective call: shorter than hang_s, so that a call to a vanished
                   machine ends by itself
    hang_s         without any rank completing a batch
    unreachable_s  for a worker's machine to answer at all; its kernel answers even for a process
                   that is stopped
    silent_s       between two heartbeats of a process in `setup`, which may take long, but not
                   silently
    """

    start_s: float
    setup_s: float
    join_s: float
    collective_s: float
    hang_s: float

    @classmethod
    def derive(cls, *, timeout_s: float, hang_timeout_s: float, start_s: float) -> Limits:
        return cls(
            start_s=start_s,
            setup_s=timeout_s,
            join_s=min(timeout_s, JOIN_AT_MOST_S),
            collective_s=min(timeout_s, 0.9 * hang_timeout_s),
            hang_s=hang_timeout_s,
        )

    @property
    def unreachable_s(self) -> float:
        return min(self.hang_s / 2, UNREACHABLE_AT_MOST_S)

    @property
    def silent_s(self) -> float:
        return max(self.hang_s, SILENT_AT_LEAST_S)


Grow = bool | Literal["epoch"]
EXCLUDED: Exclusions = (
    ({"hot_spares": bool, "grow": (False,)}, "with grow=False no worker is replaced. Leave one out"),
)


@suggesting_fields
@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """How training continues when workers fail, leave and join. Elasticity is on by default; these
    fields tune it.

    min_workers      train with at least this many workers; with fewer, wait for machines
    backoff_s        the first wait for machines; each further one is twice as long
    backoff_max_s    the longest wait
    max_attempts     waits in a row before the call raises an error
    hang_timeout_s   after this long without progress, kill the rank that blocks the others (after a
                     tenth of it, log a warning with its stack)
    grow             True: add new workers at a batch boundary; "epoch": between calls; False: never
    batch            "auto": a batch is divided into `num_workers` parts, and fewer workers compute
                     the same parts, if the operator follows the contract of `train_batch`;
                     otherwise "per_worker": each worker keeps its batch size
    shares           how the `parts` of a `TorchTrainer` are dealt to its workers: "equal", or
                     "speed": in proportion to the speed of each
    snapshot_every   how often to take the snapshot that new processes start from when no worker is
                     left: "epoch", a number of batches, seconds as a float, or None
    on_divergence    what happens if the weights of the ranks differ after a call of `train`.
                     "warn": log a warning; "raise": `train()` raises DivergenceError; None: nothing
                     is compared
    hot_spares       additional workers that are set up and wait, and replace workers that fail or
                     leave
    """

    min_workers: int = 1
    backoff_s: float = 1.0
    backoff_max_s: float = 60.0
    max_attempts: int = 10
    hang_timeout_s: float = 600.0
    grow: Grow = True
    batch: Literal["auto", "per_worker"] = "auto"
    shares: Literal["equal", "speed"] = "equal"
    snapshot_every: Literal["epoch"] | int | float | None = "epoch"
    hot_spares: int = 0
    on_divergence: Literal["warn", "raise"] | None = "warn"

    def __post_init__(self) -> None:
        for name, least in {"min_workers": 1, "max_attempts": 1, "hot_spares": 0}.items():
            at_least(name, getattr(self, name), least, whole=True)
        at_least("backoff_s", self.backoff_s, 0)
        at_least("backoff_max_s", self.backoff_max_s, self.backoff_s)
        above_0("hang_timeout_s", self.hang_timeout_s)
        one_of("batch", self.batch, "auto", "per_worker")
        one_of("shares", self.shares, "equal", "speed")
        one_of("on_divergence", self.on_divergence, "warn", "raise", None)
        if not (isinstance(self.grow, bool) or self.grow == "epoch"):
            raise ConfigError(f"grow must be True, False or 'epoch', got {self.grow!r}")
        every = self.snapshot_every
        if not (every in (None, "epoch") or (is_real(every) and float(every) > 0)):
            raise ConfigError(
                f"snapshot_every must be 'epoch', a whole number of batches, seconds as a float, or None, got {every!r}"
            )
        refuse(EXCLUDED, vars(self))


def refuse_comparison(elastic: ElasticConfig, why: str) -> None:
    """Raise ConfigError if the user asks for a comparison of weights that cannot be made."""
    if elastic.on_divergence == "raise":
        raise ConfigError(
            f"ElasticConfig(on_divergence='raise') compares the weights of the ranks, and {why}: leave it out"
        )


def refuse_shares(elastic: ElasticConfig) -> None:
    """Raise ConfigError if `shares` is set where raysgd divides no batch into parts."""
    if elastic.shares != "equal":
        raise ConfigError(
            f"ElasticConfig(shares={elastic.shares!r}) is for TorchTrainer, which divides a batch into parts: leave shares out"
        )


@dataclass(frozen=True, kw_only=True)
class WorkerResources:
    """What one worker reserves in the cluster. `custom` has Ray's resource names."""

    cpus: float = 1
    gpus: float = 0
    custom: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(
        cls, num_cpus: Any, use_gpu: bool, resources: Mapping[str, Any] | None, *, gpu_asked: bool | None = None
    ) -> WorkerResources:
        """Find the resources that a trainer's arguments mean; `resources_per_worker` overrides the
        others, key by key.

        `gpu_asked` is the argument `use_gpu`: True, False, or None for "auto".
        """
        if resources is not None and not isinstance(resources, Mapping):
            raise ConfigError(f"resources_per_worker must be a dict such as {{'CPU': 2, 'GPU': 1}}, got {resources!r}")
        wanted = dict(resources or {})
        for name, amount in {"num_cpus_per_worker": num_cpus, **wanted}.items():
            at_least(name, amount, 0)
        cpus = wanted.pop("CPU", num_cpus)
        gpus = wanted.pop("GPU", int(use_gpu))
        if gpus and gpu_asked is False:
            raise ConfigError(f"resources_per_worker asks for {gpus} GPU but use_gpu is False: set use_gpu=True")
        if gpu_asked and not gpus:
            raise ConfigError(
                "use_gpu is True but resources_per_worker['GPU'] is 0: give it 1 or more, or leave it out"
            )
        return cls(cpus=cpus, gpus=gpus, custom=wanted)

    def as_dict(self) -> dict[str, float]:
        named = {"CPU": self.cpus, "GPU": self.gpus, **self.custom}
        return {name: amount for name, amount in named.items() if amount}

    def fits(self, free: Mapping[str, float]) -> int:
        """Count how many such workers a node (or cluster) with the resources `free` can hold."""
        wanted = self.as_dict()
        if not wanted:
            return 1 << 20
        return min(int((free.get(name, 0.0) + 1e-6) // amount) for name, amount in wanted.items())
