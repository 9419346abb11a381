"""Tensors through shared memory of a host.

The choice between transports belongs to `broker.transports.factory` and `routes`.
"""
