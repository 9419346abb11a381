"""The sender's side of a handoff, and the channels of its offers, grants and receipts.

Bytes of tensors belong to `transports`. Imports `broker.cluster`, `broker.transports` and `common`.
"""
