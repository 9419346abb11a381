"""Tensors by NIXL (UCX): RDMA between hosts, and between GPUs.

The choice between transports belongs to `broker.transports.factory` and `routes`.
"""
