"""Which errors are interruptions and which are user errors, and the addresses that workers offer."""

import pytest

tf = pytest.importorskip("tensorflow")

from raysgd.tf.cluster_config import NoFreePortError  # noqa: E402
from raysgd.tf.process_group import TensorFlowBackend  # noqa: E402


def unavailable(text: str) -> Exception:
    return tf.errors.UnavailableError(None, None, text)


def test_the_runtimes_own_errors_are_interruptions() -> None:
    backend = TensorFlowBackend()
    assert backend.is_interruption(unavailable("Collective ops is aborted by: Connection reset by peer"))
    assert backend.is_interruption(NoFreePortError("all are taken"))
    assert not backend.is_interruption(unavailable("the bucket is not there"))
    assert not backend.is_interruption(ValueError("Collective"))
    assert not backend.is_interruption(tf.errors.InvalidArgumentError(None, None, "Collective sizes differ"))


def test_an_error_raised_while_handling_an_interruption_counts_too() -> None:
    with pytest.raises(KeyError) as caught:
        try:
            raise unavailable("Collective ops is aborted by: a peer left this generation")
        except tf.errors.OpError:
            {}["result"]
    assert TensorFlowBackend().is_interruption(caught.value)
