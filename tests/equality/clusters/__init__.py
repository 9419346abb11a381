"""`LLM` == a cluster of processes, by family, interface and topology."""
