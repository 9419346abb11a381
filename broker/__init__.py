"""Everything between processes: the registry and control messages (cluster), handoffs, and tensors (transports).

No model, torch or HTTP API belongs here. Imports `common` only, beside redis and zmq.
"""
