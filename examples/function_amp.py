"""Mixed precision in a training function: three calls, and the same loop in both precisions.

float16 with a scaled loss on a GPU, bfloat16 on a CPU; parameters, and so checkpoints, stay float32.

    python examples/function_amp.py --num-workers 2
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import train
from raysgd.train import Trainer


class Net(nn.Module):
    """Is a point nearer to the origin than most? It remembers in which format it computed."""

    def __init__(self):
        super().__init__()
        self.hidden, self.last = nn.Linear(16, 128), nn.Linear(128, 2)
        self.computed_in = None

    def forward(self, x):
        x = self.hidden(x)
        self.computed_in = x.dtype
        return self.last(torch.relu(x))


def train_func(config):
    train.torch.accelerate(amp=config["amp"])
    torch.manual_seed(0)
    points = torch.randn(1024, 16)
    data = TensorDataset(points, (points.norm(dim=1) < 15.4**0.5).long())
    loader = train.torch.prepare_data_loader(DataLoader(data, batch_size=32, shuffle=True))
    net = Net()
    model = train.torch.prepare_model(net)
    optimizer = train.torch.prepare_optimizer(torch.optim.Adam(model.parameters(), lr=3e-3))
    for epoch in range(config["epochs"]):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            train.torch.backward(loss)
            optimizer.step()
            total += loss.item()
        train.report(epoch=epoch, train_loss=total / len(loader))
    return str(net.computed_in), {str(parameter.dtype) for parameter in net.parameters()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="fewer epochs")
    args = parser.parse_args()

    with Trainer(backend="torch", num_workers=args.num_workers) as trainer:
        for amp in (False, True):
            rounds = trainer.run_iterator(train_func, {"amp": amp, "epochs": 8 if args.smoke else 20})
            losses = [rows[0]["train_loss"] for rows in rounds]
            computed_in, kept_in = rounds.get_final_results()[0]
            print(f"amp={amp}: train_loss {losses[0]:.3f} -> train_loss {losses[-1]:.3f}")
            print(f"computed in {computed_in}, kept in {', '.join(kept_in)}")


if __name__ == "__main__":
    main()
