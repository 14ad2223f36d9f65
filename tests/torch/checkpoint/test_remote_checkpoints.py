"""`save` and `load` of the class API with remote URIs, and with arguments that are neither a path nor a URI."""

import pytest
import torch

from raysgd import CheckpointError, ConfigError
from tests import storing
from tests.torch.small import inline, weights


@pytest.mark.parametrize(("use_ray", "blocking"), [(False, True), (True, False)])
def test_save_and_load_on_s3(request: pytest.FixtureRequest, bucket: str, use_ray: bool, blocking: bool) -> None:
    if use_ray:
        request.getfixturevalue("ray_cluster")
    with inline(use_ray=use_ray) as trainer:
        trainer.train()
        saved = weights(trainer)
        for _ in range(2):  # the second save replaces the first
            given = trainer.save(f"{bucket}/models/line.pt", blocking=blocking)
            path = given if isinstance(given, str) else given.result(60)
        assert path == f"{bucket}/models/line.pt"
        trainer.train()
        assert not torch.equal(weights(trainer), saved)
        trainer.load(path)
        assert torch.equal(weights(trainer), saved)
    assert storing.names(f"{bucket}/models") == ["line.pt"]


def test_missing_and_unknown_files_are_named_in_the_error(bucket: str) -> None:
    storing.write(f"{bucket}/foreign", b"hello")
    with inline() as trainer:
        before = weights(trainer)
        with pytest.raises(CheckpointError, match=f"there is no checkpoint at {bucket}/absent"):
            trainer.load(f"{bucket}/absent")
        with pytest.raises(CheckpointError, match=f"{bucket}/foreign: not a complete checkpoint"):
            trainer.load(f"{bucket}/foreign")
        with pytest.raises(CheckpointError, match="cannot be written"):
            trainer.save("s3://no-such-bucket/line.pt")
        with pytest.raises(CheckpointError, match="cannot be"):
            trainer.save("s3://no-such-bucket/parts", sharded=True)
        assert torch.equal(weights(trainer), before)
        assert trainer.train()["epoch"] == 1, "it can be used as before"


@pytest.mark.more
def test_tensorflow(bucket: str) -> None:
    pytest.importorskip("tensorflow")
    from raysgd.tf import TFTrainer
    from tests.tf.small import Small as SmallKeras

    with TFTrainer(training_operator_cls=SmallKeras, config={"normalized": False}) as trainer:
        trainer.train(num_steps=2)
        path = trainer.save(f"{bucket}/keras.ckpt")
        assert path == f"{bucket}/keras.ckpt"
        for call in (trainer.save, trainer.load):
            with pytest.raises(ConfigError, match="a path, or a URI"):
                call("")
        saved = trainer.get_model().get_weights()
        trainer.train()
        trainer.load(path)
        for mine, expected in zip(trainer.get_model().get_weights(), saved, strict=True):
            assert (mine == expected).all()
