"""The ways of a tensor from one process to another, all behind the interface of `broker.transports.base`.

broker.tensors chooses between them.
"""
