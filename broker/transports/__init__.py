"""The ways of a tensor from one process to another, all behind the interface of `broker.transports.base`.

broker.transports.tensors chooses between them.
"""
