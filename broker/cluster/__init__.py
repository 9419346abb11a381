"""Members of a cluster: registry, presence, calls between proxy and worker, keys of sockets, the embedded broker.

Tensors and handoffs do not belong here. Imports `common` only.
"""
