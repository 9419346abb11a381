"""Media of requests: fetched, decoded from base64, checked; recordings cut into windows, videos into pieces.

Images and audio are decoded by encoders, not here. Imports `common` and `proxy.server`, and `MediaItem` of
`proxy.dispatch.jobs`.
"""
