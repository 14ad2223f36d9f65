"""The same seed, data and global batch give the same weights in a hand-written loop, with one worker on Ray and with two."""

import os

import torch

from raysgd.torch import TorchTrainer
from raysgd.utils import BATCH_SIZE
from tests.class_api.operators import Classes, plain_loop
from tests.torch.small import weights

EPOCHS = 3


def test_weights_of_two_workers_equal_a_hand_written_loop(ray_cluster: None) -> None:
    with TorchTrainer(training_operator_cls=Classes, config={BATCH_SIZE: 16}, num_workers=2, use_gpu=False) as trainer:
        results = [trainer.train() for _ in range(EPOCHS)]
        trained = weights(trainer)
    assert torch.allclose(trained, plain_loop(EPOCHS, 16), rtol=1e-4, atol=1e-6)
    assert [result["num_samples"] for result in results] == [64] * EPOCHS


def test_one_worker_on_ray_is_like_one_in_this_process(ray_cluster: None) -> None:
    with TorchTrainer(training_operator_cls=Classes, config={BATCH_SIZE: 16}, use_ray=True, use_gpu=False) as trainer:
        assert trainer.apply_all_workers(os.getpid) != [os.getpid()]
        assert trainer.apply_all_operators(lambda operator: type(operator.model).__name__) == ["Net"]
        assert trainer.apply_all_operators(lambda operator: operator._is_distributed) == [False]
        for _ in range(EPOCHS):
            trainer.train()
        assert torch.allclose(weights(trainer), plain_loop(EPOCHS, 16), rtol=1e-5, atol=1e-7)
        assert trainer.validate()["num_samples"] == 101
        assert type(trainer.get_local_operator()) is Classes
