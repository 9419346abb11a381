"""Tensors through shared memory, on one host.

The choice between transports belongs to `broker.transports.factory` and `routes`.
"""
