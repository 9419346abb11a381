"""Tensors through shared memory of a host: an arena per pair, and memory pushed ahead of a tensor.

Not here: the choice between transports (factory, routes), the socket's protocol (linked). May import `linked`, the
interface (base), `arena`, `received`, `checksums` and `common`.
"""
