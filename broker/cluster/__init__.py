"""Members of a cluster: registry, presence, calls between proxy and worker, keys of sockets, the embedded broker.

Not here: tensors (broker.transports) and handoffs (broker.handoff). May import `common` only.
"""
