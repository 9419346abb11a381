"""Tensors by NIXL (UCX): RDMA between hosts, and between GPUs.

Not here: the choice between transports (factory, routes). May import `cuda` (runtime, arena), the interface (base),
`checksums`, `payload`, `received`, `broker.cluster` and `common`.
"""
