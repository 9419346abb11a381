"""Names and bytes that other processes, clients and dashboards rely on: a change must be made on purpose."""
