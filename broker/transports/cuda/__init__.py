"""Tensors between GPUs of a host, by CUDA IPC.

Not here: the choice between transports (factory, routes), the socket's protocol (linked), torch. May import `linked`,
the interface (base), `arena`, `payload`, `received` and `common`.
"""
