"""Prefill and whole models on a device: what lives where, what streams when, and when the GPU is worth it."""
