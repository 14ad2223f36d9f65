"""Modules of `ray.util.sgd.tf`, which Python finds as modules of `raysgd.tf`. Both."""
