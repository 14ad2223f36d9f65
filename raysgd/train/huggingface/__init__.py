"""Trainers of Hugging Face's transformers in training functions (extra: huggingface). Worker."""

from importlib.util import find_spec

from raysgd.train.packages import check_version

if find_spec("transformers") is None:  # pragma: no cover - depends on what is installed
    raise ImportError("raysgd.train.huggingface needs transformers: pip install 'raysgd[huggingface]'")
check_version("transformers", "4.57", extra="huggingface")
check_version("accelerate", "1.3", extra="huggingface")
