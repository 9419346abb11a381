"""Media of requests: fetched, decoded from base64, checked; recordings cut into windows, videos into pieces.

Images and audio are decoded by encoders, not here. Imports `common` and `proxy.server`, `MediaItem` of
`proxy.dispatch.jobs`, and `broker.cluster.lifetime` for helper processes.
"""
