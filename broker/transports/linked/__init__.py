"""Links over a Unix socket: the common part of the transports shm and cuda.

Not here: memory itself, which each transport brings. May import the interface (base), `arena`, `payload`,
`received` and `common`.
"""
