"""A causal language model, of which PEFT's LoRA trains a few weights, in the manner of transformers' run_clm.py. Of raysgd it knows
nothing.

torchrun --nproc-per-node 2 -m tests.train.scripts.lora --output-dir FOLDER
"""

import argparse
import sys
from itertools import chain

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, default_data_collator, set_seed


def group_texts(texts, block_size):
    """Join the texts, and divide them into blocks."""
    joined = list(chain.from_iterable(texts))
    blocks = [joined[start : start + block_size] for start in range(0, len(joined) - block_size + 1, block_size)]
    return [{"input_ids": block, "labels": block.copy()} for block in blocks]


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-train-samples", type=int, default=240)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--lora-r", type=int, default=4)
    args = parser.parse_args(arguments)
    set_seed(0)

    texts = [list(f"to be or not to be, that is question {number}. ".encode()) for number in range(100)]
    blocks = group_texts(texts, args.block_size)[: args.max_train_samples]
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = AutoModelForCausalLM.from_config(config)
    peft_config = LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=args.lora_r, lora_alpha=16, target_modules=["q_proj", "v_proj", "lm_head"]
    )
    model = get_peft_model(model, peft_config)
    model.print_trainable_parameters()

    training_args = TrainingArguments(
        output_dir=args.output_dir,
        num_train_epochs=args.epochs,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        max_grad_norm=1.0,
        logging_steps=5,
        save_strategy="epoch",
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
    )
    trainer = Trainer(model=model, args=training_args, train_dataset=blocks, data_collator=default_data_collator)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main(sys.argv[1:])
