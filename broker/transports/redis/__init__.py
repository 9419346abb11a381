"""Tensors through the broker, for processes that reach nothing else.

Not here: the choice between transports (factory, routes). May import the interface (base), `checksums`, `received`,
and `common`.
"""
