"""Samples that are fetched while training runs."""

from raysgd.data.dataset import Dataset

__all__ = ["Dataset"]
