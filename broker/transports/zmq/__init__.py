"""Tensors over ZMQ (TCP).

The choice between transports belongs to `broker.transports.factory` and `routes`.
"""
