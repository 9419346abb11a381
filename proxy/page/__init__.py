"""The page at the proxy's root, and the JSON about the cluster and its requests that the page reads.

`overview` makes the JSON of /v1/cluster and /v1/requests. Requests that generate belong to `proxy.api`. May import
`proxy.service` and the layers below.
"""
