"""Optimizer steps over fake tensors: what they allocate and compute."""
