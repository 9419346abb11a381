"""Tensors through the broker.

The choice between transports belongs to `broker.transports.factory` and `routes`.
"""
