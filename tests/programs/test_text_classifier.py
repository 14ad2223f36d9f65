"""The text classifier ends with the weights of the same program without raysgd, and prints the same figures."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler

from raysgd import seed_for
from tests.programs import by_hand

for package in ("tokenizers", "transformers"):
    pytest.importorskip(package, reason="needs transformers: pip install 'raysgd[operators]'")

# The last step of an epoch has 13 texts: on two workers, 7 and 6.
SMALL = {"epochs": 3, "rows": 205, "batch": 16}


def collate(rows: list[tuple[str, int]]) -> dict[str, torch.Tensor]:
    words = import_module("examples.programs.text_classifier").WORDS
    ids = torch.zeros(len(rows), max(len(text.split()) for text, _ in rows), dtype=torch.long)
    for row, (text, _) in zip(ids, rows, strict=True):
        numbers = torch.tensor([words.index(word) for word in text.split()])
        row[: len(numbers)] = numbers
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([label for _, label in rows])}


def loop(rank: int, workers: int, epochs: int, rows: int, batch: int) -> tuple[list[dict[str, float]], dict[str, Any]]:
    from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

    program = import_module("examples.programs.text_classifier")

    def loader(data: Any, size: int, sampler: Any, generator: torch.Generator | None = None) -> Any:
        share = by_hand.Share(sampler, size * workers, rank, workers)
        return DataLoader(data, batch_sampler=share, collate_fn=collate, generator=generator)

    torch.manual_seed(0)
    data, held_out, order = program.texts(rows, 1), program.texts(150, 2), torch.Generator().manual_seed(3)
    training = loader(data, batch, RandomSampler(data, generator=order), order)
    validation = loader(held_out, 50, range(150))
    bare = BertForSequenceClassification(BertConfig(vocab_size=len(program.WORDS), num_labels=3, **program.SIZES))
    optimizer = torch.optim.AdamW(bare.parameters(), lr=0.003)
    steps = epochs * -(-rows // (batch * workers))
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    model, weight = DistributedDataParallel(bare) if workers > 1 else bare, by_hand.Weight(bare)

    figures = []
    for epoch in range(1, epochs + 1):
        model.train()
        lost = right = 0.0
        for number, texts in enumerate(training):
            seed_for(0, epoch=epoch, offset=by_hand.place(number, batch * workers, rows, rank, workers))
            mine = len(texts["labels"])
            weight.value = mine * workers / by_hand.total(mine)[0]
            optimizer.zero_grad()
            loss = model(**texts).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            lost += loss.item() * mine
        figures.append({"train_loss": by_hand.total(lost)[0] / rows})
        model.eval()
        lost = right = 0.0
        with torch.no_grad():
            for texts in validation:
                output = bare(**texts)
                lost += output.loss.item() * len(texts["labels"])
                right += (output.logits.argmax(dim=1) == texts["labels"]).sum().item()
        figures.append(dict(zip(("val_loss", "val_accuracy"), by_hand.total(lost / 150, right / 150), strict=True)))
    return figures, bare.state_dict()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_equal_to_a_loop_by_hand(workers: int, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if workers > 1:
        request.getfixturevalue("ray_cluster")
    settings = {"workers": workers, **SMALL}
    history, model = import_module("examples.programs.text_classifier").main(by_hand.arguments(settings))
    figures, weights = by_hand.run(loop, tmp_path, settings) if workers > 1 else loop(0, **settings)
    by_hand.assert_equal(history, figures)
    by_hand.assert_equal_weights(model, weights)
