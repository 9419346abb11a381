"""The sender's side of a handoff, and the channels of its offers, grants and receipts.

Not here: bytes of tensors (broker.transports), the receiver's side (services.handoff), decisions on memory
(engine.handoff). May import `broker.transports`, `broker.cluster` and `common`.
"""
