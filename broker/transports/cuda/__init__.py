"""Tensors between GPUs of one host, by CUDA IPC.

The choice between transports belongs to `broker.transports.factory` and `routes`.
"""
