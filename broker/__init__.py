"""Everything between processes: the registry and control messages (cluster), handoffs, and tensors (transports).

Not here: models, torch, the HTTP API, decisions on memory (engine.handoff). May import `common` only, beside redis, zmq
and the optional NIXL. Floors: handoff above transports above cluster.
"""
