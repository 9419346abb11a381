"""Both ends of a handoff in a worker: encoder outputs and KV into an engine, KV out of an engine.

Not here: the protocol's state at its sender (broker.handoff.sender) and decisions on memory (engine.handoff).
May import services.worker_context and services.process, and the floors below services.
"""
