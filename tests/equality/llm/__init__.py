"""transformers' `generate` == `LLM`, by family."""
