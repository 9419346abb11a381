"""HTTP side of the proxy, independent of the API: admission, limits, errors, keys, metrics, timelines.

Request formats belong to `proxy.api`, requests to workers to `proxy.dispatch`. Imports `common` only.
"""
