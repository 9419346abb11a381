"""Our own CPU kernels: compiled when first needed, kept in the user's cache, never required."""
