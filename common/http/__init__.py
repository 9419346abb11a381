"""HTTP servers of all processes: listening sockets, bounded connections, access by key, the guard against tiny chunks.

Routes and answers belong to `proxy` and `services`. Imports `common` only, and uvicorn, h11 and starlette.
"""
