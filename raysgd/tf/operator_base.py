"""What an operator may ask and use: its place, and a step that is right on any number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from raysgd.core.meters import AverageMeterCollection
from raysgd.core.ranks import RankInfo
from raysgd.core.timers import TimerCollection
from raysgd.errors import ConfigError
from raysgd.tf.channel import Channel
from raysgd.tf.parts import Parts, as_tensor, assign, build_unbuilt, running_statistics
from raysgd.tf.settings import ReplicaSettings

__all__ = ["OperatorBase"]


class OperatorBase:
    """Owns the registered parts and the channel to the other ranks. The replica tells it each batch's share."""

    def __init__(
        self,
        config: dict[str, Any] | None = None,
        *,
        settings: ReplicaSettings | None = None,
        rank_info: RankInfo | None = None,
    ) -> None:
        self._config: dict[str, Any] = {} if config is None else config
        self._settings = settings or ReplicaSettings()
        self._rank_info = rank_info or RankInfo()
        self._channel = Channel(self._rank_info.world_size)
        # This rank's part of the batch of all ranks: a variable, so that a graph function need not be traced anew.
        self._share = tf.Variable(1.0, trainable=False)
        self._share_now = 1.0
        self._parts = Parts()
        self._statistics: list[Any] = []
        self._meter = AverageMeterCollection()
        self.timers = TimerCollection()
        self.global_step = 0
        self.setup(self._config)
        if self._parts.registered:
            self._complete()

    def setup(self, config: dict[str, Any]) -> None:
        """Make the parts and register them with `self.register` and `self.register_data`."""
        raise NotImplementedError(
            f"{type(self).__name__} has no setup(self, config): make model, optimizer and data there, and call "
            "self.register(...) and self.register_data(...)"
        )

    def _complete(self) -> None:
        """Every variable exists from here on, with rank 0's value."""
        parts = self._parts
        build_unbuilt(parts)
        for optimizer in parts.optimizers:
            if not getattr(optimizer, "built", False):
                optimizer.build(parts.trained_by(optimizer))
        self._statistics = running_statistics(parts.models)
        weights = [variable for model in parts.models for variable in model.weights]
        assign(weights, self._channel.broadcast(weights, source=self.world_rank == 0))

    # -- helpers for custom batches -------------------------------------------------------------------

    def step(self, tape: Any, loss: Any, *, model: Any = None, optimizer: Any = None) -> None:
        """One optimizer step on a loss that is a mean over this worker's batch, averaged over the workers.

            with tf.GradientTape() as tape:
                loss = self.criterion(y, self.model(x, training=True))
            self.step(tape, loss)

        Works inside a `tf.function` (as it should be used) and outside. With several models and optimizers say
        which are meant. Nothing is applied anywhere unless every rank's gradients have arrived.
        """
        as_it_is = tf.autograph.experimental.do_not_convert  # there is nothing to convert, and trying takes seconds
        as_it_is(self._step)(tape, loss, model, optimizer)

    def _step(self, tape: Any, loss: Any, model: Any, optimizer: Any) -> None:
        optimizer = self._only(self._parts.optimizers, "optimizer") if optimizer is None else optimizer
        gradients, variables = self.gradients(tape, loss, model=model, optimizer=optimizer)
        self.apply_gradients(gradients, variables, optimizer=optimizer)

    def gradients(
        self, tape: Any, loss: Any, *, model: Any = None, optimizer: Any = None
    ) -> tuple[list[Any], list[Any]]:
        """The first half of a step, for who wants to clip or count gradients: those of the batch of all workers, the
        same on each of them, and the variables they are for. Under mixed_float16 they are still scaled."""
        optimizer = self._only(self._parts.optimizers, "optimizer") if optimizer is None else optimizer
        trained = self._parts.trained_by(optimizer) if model is None else list(model.trainable_variables)
        found = tape.gradient(loss, trained, output_gradients=self._share * _scale(optimizer, loss))
        pairs = [(g, v) for g, v in zip(found, trained, strict=True) if g is not None]
        if not pairs:
            raise ConfigError("the loss depends on none of the variables to be trained: there are no gradients")
        variables = [variable for _, variable in pairs]
        mine = [tf.convert_to_tensor(gradient) for gradient, _ in pairs]
        if self._channel.size == 1:
            return mine, variables
        parts = [as_tensor(v) * tf.cast(self._share, v.dtype) for v in self._statistics]
        arrived = self._channel.sum([*mine, *parts])
        with tf.control_dependencies(arrived):
            for variable, mean in zip(self._statistics, arrived[len(pairs) :], strict=True):
                variable.assign(mean)
            return [tf.identity(gradient) for gradient in arrived[: len(pairs)]], variables

    def apply_gradients(self, gradients: Sequence[Any], variables: Sequence[Any], *, optimizer: Any) -> None:
        """The second half of a step: this worker's optimizer applies what all workers have."""
        if not hasattr(optimizer, "scale_loss") and hasattr(optimizer, "get_unscaled_gradients"):
            gradients = optimizer.get_unscaled_gradients(gradients)  # Keras 2 leaves that to the caller
        # The optimizer counts its steps without looking at the gradients: not before they are there.
        with tf.control_dependencies([tf.convert_to_tensor(gradient) for gradient in gradients]):
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def _take_share(self, share: float) -> None:
        if share != self._share_now:
            self._share_now = share
            self._share.assign(share)

    def _only(self, parts: list[Any], name: str) -> Any:
        if len(parts) != 1:
            raise ConfigError(f"{len(parts)} {name}s are registered: say which one, step(tape, loss, {name}=...)")
        return parts[0]

    # -- what an operator may ask ---------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        return self._config

    @property
    def world_size(self) -> int:
        """How many workers there are now."""
        return self._rank_info.world_size

    @property
    def world_rank(self) -> int:
        return self._rank_info.world_rank

    @property
    def local_rank(self) -> int:
        """The rank among the workers of this machine."""
        return self._rank_info.local_rank

    @property
    def use_gpu(self) -> bool:
        return self._settings.use_gpu

    @property
    def use_tqdm(self) -> bool:
        return self._settings.use_tqdm


def _scale(optimizer: Any, loss: Any) -> Any:
    """By what a mixed-precision optimizer wants the loss multiplied; one, for any other."""
    one = tf.ones_like(loss)
    if hasattr(optimizer, "scale_loss"):  # Keras 3: every optimizer has it
        return optimizer.scale_loss(one)
    if hasattr(optimizer, "get_scaled_loss"):
        return optimizer.get_scaled_loss(one)
    return one
