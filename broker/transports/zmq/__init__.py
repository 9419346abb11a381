"""Tensors over ZMQ (TCP).

Not here: the choice between transports (factory, routes). May import the interface (base), `checksums`, `payload`,
`received`, `broker.cluster` and `common`.
"""
