"""Pallas kernels for TPU and GPU; ``specjax.ops`` chooses among them."""
