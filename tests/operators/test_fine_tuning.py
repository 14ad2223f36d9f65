"""The ready-made operator for models of transformers: packing, LoRA, and metrics over the tokens of all workers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from raysgd import TorchTrainer
from raysgd.constants import BATCH_SIZE

pytest.importorskip("peft")
pytest.importorskip("torchmetrics")
pytest.importorskip("transformers")

import transformers

from raysgd.operators.fine_tuning import SMALL_LLAMA, FineTuningOperator, markov_documents, packed
from tests.local.group import Cluster
from tests.peek import parts_of


def weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in trainer.get_model().state_dict().items()}


@pytest.mark.more
def test_learns_from_scratch_and_then_other_data_with_adapters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with TorchTrainer(
        training_operator_cls=FineTuningOperator, config={"epochs": 4}, scheduler_step_freq="batch"
    ) as trainer:
        trainer.fit(4, validate_every=0)
        result = trainer.validate()
        trainer.apply_all_operators(lambda operator: operator.save_pretrained(str(tmp_path / "base")))
        assert trainer.get_local_operator().optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-9)
    assert 4 < result["val_perplexity"] < 6, "the data has 4"

    other = markov_documents(shift=1)
    config = {
        "model": str(tmp_path / "base"),
        "lora": {"r": 16, "target_modules": "all-linear"},
        "train_data": other[80:],
        "validation_data": other[:80],
        "end": 0,
        "lr": 0.02,
        "gradient_checkpointing": True,
    }
    with TorchTrainer(training_operator_cls=FineTuningOperator, config=config) as trainer:
        before, start = trainer.validate(), weights(trainer)
        for _ in range(4):
            trainer.train()
        after, end = trainer.validate(), weights(trainer)
        trainer.apply_all_operators(lambda operator: operator.save_pretrained(str(tmp_path / "adapter")))
    assert before["val_perplexity"] > 60 and after["val_perplexity"] < 15
    changed = {name for name in start if not torch.equal(start[name], end[name])}
    assert changed and all("lora_" in name for name in changed)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        path.name for path in (tmp_path / "adapter").iterdir()
    }


def test_blocks_hold_the_documents_without_padding() -> None:
    documents = [([5, 6, 7], [5, 6, 7]), ([8, 9], [-100, 9]), ([1, 2, 3, 4], [1, 2, 3, 4])]
    tokens, labels, positions = packed(documents, 4, 0).tensors
    assert tokens.tolist() == [[5, 6, 7, 0], [8, 9, 0, 1], [2, 3, 4, 0]]
    assert labels.tolist() == [[-100, 6, 7, 0], [-100, 9, 0, -100], [2, 3, 4, 0]]
    assert positions.tolist() == [[0, 1, 2, 3], [0, 1, 2, 0], [0, 1, 2, 3]]
    with pytest.raises(ValueError, match=r"2 tokens do not fill one block of 4.*block_size"):
        packed([([1, 2], [1, 2])], 4, None)


def test_labels_belong_to_their_tokens() -> None:
    documents = [([5, 6, 7], [5, 6, 7]), ([], []), ([8, 9, 1], [8, 9, 1])]
    for end, expected in ((0, [[-100, 6, 7, 0], [-100, 9, 1, 0]]), (None, [[-100, 6, 7, -100]])):
        blocks = packed(documents, 4, end)
        assert blocks.tensors[1].tolist() == expected
        without = packed([documents[0], documents[2]], 4, end)
        for given, same in zip(blocks.tensors, without.tensors, strict=True):
            assert torch.equal(given, same)
    with pytest.raises(
        ValueError, match=r"number of labels is 2, and that of its tokens is 3.*Give each token a label"
    ):
        packed([([5, 6, 7], [5, 6]), *documents], 4, 0)


def test_the_loss_of_training_is_a_mean_over_the_predicted_tokens() -> None:
    prompts = [{"input_ids": each["input_ids"], "labels": [-100] * len(each["input_ids"])} for each in half_prompts()]
    documents = [*half_prompts(), *prompts]
    config = {"train_data": documents, "validation_data": documents, "block_size": 32, "batch_size": 1, "lr": 0.0}
    with TorchTrainer(training_operator_cls=FineTuningOperator, config=config) as trainer:
        assert trainer.train()["train_loss"] == pytest.approx(trainer.validate()["val_loss"], rel=1e-4)


def test_no_token_attends_to_an_earlier_document() -> None:
    torch.manual_seed(0)
    with TorchTrainer(training_operator_cls=FineTuningOperator) as trainer:
        model = trainer.get_model().eval()
    block = torch.tensor([[5, 6, 7, 0, 8, 9, 3, 4]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    together = model(input_ids=block, position_ids=positions).logits
    alone = model(input_ids=block[:, 4:]).logits
    assert torch.allclose(together[:, 4:], alone, atol=1e-5)
    assert not torch.allclose(together[:, 4:], model(input_ids=block).logits[:, 4:], atol=1e-3)


class PlainSteps(FineTuningOperator):
    """Steps with SGD, because a step of AdamW hides how large the gradient is."""

    def make_optimizer(self, model: Any, config: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.5)

    def make_model(self, config: Any) -> Any:
        torch.manual_seed(3)
        return super().make_model(config)


def half_prompts() -> list[dict[str, list[int]]]:
    """Return documents of which very different numbers of tokens are to be predicted."""
    return [
        {"input_ids": each, "labels": [-100 if index < number else token for index, token in enumerate(each)]}
        for number, each in enumerate(markov_documents(40))
    ]


def measured(workers: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]:
    documents = half_prompts()
    config = {"train_data": documents, "validation_data": documents, "end": 0, "block_size": 32, BATCH_SIZE: 100}
    with Cluster(), TorchTrainer(training_operator_cls=PlainSteps, config=config, num_workers=workers) as trainer:
        before = trainer.validate()
        trainer.train(num_steps=1)
        return before, trainer.validate(), weights(trainer)


def test_two_workers_measure_and_step_as_one() -> None:
    before, after, trained = measured(1)
    two_before, two_after, two_trained = measured(2)
    for one, two in ((before, two_before), (after, two_after)):
        assert one.keys() == two.keys()
        assert {name: two[name] for name in one} == pytest.approx(one, rel=1e-4)
        assert one["val_perplexity"] == pytest.approx(math.exp(one["val_loss"]), rel=1e-4)
    assert after["val_loss"] < before["val_loss"]
    for name, value in trained.items():
        assert torch.allclose(value, two_trained[name], atol=1e-5), name

    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMALL_LLAMA)).eval()
    model.config.use_cache = False
    pairs = [(each["input_ids"], each["labels"]) for each in half_prompts()]
    tokens, labels, positions = packed(pairs, 32, 0).tensors
    with torch.no_grad():
        scores = model(input_ids=tokens, position_ids=positions).logits[:, :-1]
    assert before["val_tokens"] == (labels[:, 1:] != -100).sum()
    assert before["val_loss"] == pytest.approx(
        float(cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten())), rel=1e-4
    )


def test_texts_need_a_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[END]": 0, "to": 1, "be": 2, "or": 3, "not": 4}, unk_token="[END]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[END]").save_pretrained(tmp_path)
    config = {"train_data": ["to be or not", "to be"], "tokenizer": str(tmp_path), "block_size": 4}
    with TorchTrainer(training_operator_cls=FineTuningOperator, config=config) as trainer:
        blocks = parts_of(trainer.get_local_operator()).train_loader.dataset
        assert [block[0].tolist() for block in blocks] == [[1, 2, 3, 4], [0, 1, 2, 0]]
    with pytest.raises(ValueError, match=r"'to be or not' is a text.*config\[\"tokenizer\"\]"):
        TorchTrainer(training_operator_cls=FineTuningOperator, config={**config, "tokenizer": None})
