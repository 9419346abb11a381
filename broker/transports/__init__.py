"""Transports of tensors between processes, all behind the interface of `broker.transports.base`.

`tensors` is the door: it chooses between the transports by `routes` and `factory`. Each transport has a room of its
own; `linked` is the common part of shm and cuda. Not here: offers, grants and receipts (broker.handoff), dtypes and
tensor libraries. May import `broker.cluster` and `common`.
"""
