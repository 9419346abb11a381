"""Tensors between GPUs of a host, by CUDA IPC.

The choice between transports belongs to `broker.transports.factory` and `routes`.
"""
