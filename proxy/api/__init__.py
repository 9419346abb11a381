"""OpenAI's API: request types, endpoints, and the shapes of answers, a module per endpoint.

Placing work on workers belongs to `proxy.dispatch`, limits and transport to `proxy.server`. Imports `common`, all of
`proxy` except `proxy.app` and `proxy.routes`, and the message limit of `broker.cluster.rpc`.
"""
