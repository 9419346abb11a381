"""The proxy: an OpenAI-compatible HTTP API in front, the workers of a cluster behind.

`app` builds the process, `routes` the endpoints; `api` holds one module per endpoint, `service` what they share.
`page` shows the cluster, `observe` gathers the metrics of all instances, `media` loads images and audio, `dispatch`
runs jobs on workers, `server` is about HTTP requests themselves, `conversation` finds reasoning and tool calls in text.

Imports point down in that order (`app`, `routes`, `api`, `service`, `media`, `dispatch`, `server`, `conversation`),
then to `broker` and `common`. Neither torch nor the engine belongs here.
"""
