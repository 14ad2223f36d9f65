"""Modules of `ray.util.sgd.torch`, which Python finds as modules of `raysgd.torch`. Both."""
