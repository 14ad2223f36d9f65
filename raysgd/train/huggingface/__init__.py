"""Trainers of Hugging Face's transformers in training functions (extra: huggingface). Worker."""

from raysgd.torch.packages import check_version

check_version("transformers", extra="huggingface")
check_version("accelerate", extra="huggingface")
