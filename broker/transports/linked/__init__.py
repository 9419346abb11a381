"""Links over a Unix socket, shared by shm and cuda.

The choice between transports belongs to `broker.transports.factory` and `routes`.
"""
