"""The ready-made language model: a causal GPT that learns the default data, and an exact perplexity."""

import math

import pytest
import torch
from torch import nn

from raysgd import TorchTrainer
from raysgd.operators.language_model import GPT, LanguageModelOperator, TokenBlocks, markov_tokens


def test_learns_the_default_data() -> None:
    torch.manual_seed(0)
    config = {"width": 32, "lr": 0.01}
    with TorchTrainer(training_operator_cls=LanguageModelOperator, config=config) as trainer:
        before = trainer.validate()
        losses = [trainer.train()["train_loss"] for _ in range(2)]
        after = trainer.validate()
    assert before["val_perplexity"] == pytest.approx(64, rel=0.2), "untrained, it finds all 64 tokens equally probable"
    assert losses[1] < losses[0]
    assert 4 < after["val_perplexity"] < 16, "the data has 4"
    assert after["val_tokens"] == after["num_samples"] * 32


class Fixed(nn.Module):
    """Predicts the next number after each token, with one parameter for its certainty."""

    def __init__(self) -> None:
        super().__init__()
        self.certainty = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.certainty * nn.functional.one_hot((tokens + 1) % 3, 3).float()


def test_perplexity_is_computed_over_all_tokens_not_averaged_over_batches() -> None:
    counting = torch.arange(40) % 3  # the model predicts these correctly
    still = torch.zeros(41, dtype=torch.long)  # and these wrongly
    config = {
        "model": Fixed,
        "train_data": counting,
        "validation_data": torch.cat([counting, still]),
        "block_size": 8,
        "batch_size": 3,
    }
    with TorchTrainer(training_operator_cls=LanguageModelOperator, config=config) as trainer:
        result = trainer.validate()
    both = torch.cat([counting, still])
    right = (both[1:81] == (both[:80] + 1) % 3).float().mean().item()
    loss = math.log(math.e + 2) - right
    assert result["val_tokens"] == 80
    assert result["num_samples"] == 10
    assert result["val_loss"] == pytest.approx(loss, rel=1e-5)
    assert result["val_perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def test_the_model_does_not_look_ahead() -> None:
    torch.manual_seed(0)
    model = GPT(vocabulary=11, block_size=8, width=16, heads=2, layers=2).eval()
    tokens = torch.randint(11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    one, other = model(tokens), model(changed)
    assert one.shape == (1, 8, 11)
    assert torch.allclose(one[:, :5], other[:, :5], atol=1e-6)
    assert not torch.allclose(one[:, 5:], other[:, 5:], atol=1e-3)


def test_blocks_contain_the_tokens_in_order() -> None:
    blocks = TokenBlocks(torch.arange(10), block_size=3)
    assert [(first.tolist(), second.tolist()) for first, second in blocks] == [
        ([0, 1, 2], [1, 2, 3]),
        ([3, 4, 5], [4, 5, 6]),
        ([6, 7, 8], [7, 8, 9]),
    ]


def test_invalid_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r'3 tokens are too few.*config\["block_size"\]'):
        TokenBlocks(torch.arange(3), block_size=3)
    with pytest.raises(ValueError, match="must be a multiple of heads, got width=10 and heads=4"):
        GPT(vocabulary=4, block_size=4, width=10, heads=4, layers=1)


def test_the_default_data_is_the_same_on_every_worker() -> None:
    tokens = markov_tokens(2000, vocabulary=16, successors=2)
    assert torch.equal(tokens, markov_tokens(2000, vocabulary=16, successors=2))
    followers = {(a, b) for a, b in zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True)}
    assert len(followers) <= 2 * 16
