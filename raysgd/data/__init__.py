"""Samples that are fetched while training runs, and Ray Datasets for operators."""

from raysgd.data.dataset import Dataset
from raysgd.ray_data.columns import RayData

__all__ = ["Dataset", "RayData"]
