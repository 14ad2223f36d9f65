"""Samples that are downloaded while training runs, and Ray Datasets for operators. Both."""

from raysgd.data.dataset import Dataset
from raysgd.ray_data.columns import RayData

__all__ = ["Dataset", "RayData"]
