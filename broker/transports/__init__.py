"""Transports of tensors between processes, all behind the interface of `broker.transports.base`.

broker.transports.tensors chooses between them.
"""
