"""Token for token: transformers' `generate` == `LLM` == a cluster of processes."""
