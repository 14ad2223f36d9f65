"""Numbers that are read together are those that are read one by one, of each type."""

import torch

from raysgd.torch.meters import DeviceMeters


def test_numbers_of_all_types_keep_their_values_and_order() -> None:
    waiting = [
        torch.tensor(0.1),
        torch.tensor([2**60 + 1]),
        torch.tensor([[0.3]], dtype=torch.float64),
        torch.tensor(0.7, dtype=torch.bfloat16),
        torch.tensor(True),
        torch.tensor(float("nan")),
        torch.nn.Parameter(torch.tensor(1.5)),
        torch.tensor(0.2),
        torch.tensor(False),
    ]
    found = DeviceMeters()._read(waiting)
    assert repr(found) == repr([each.item() for each in waiting])
