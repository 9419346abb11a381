"""Media of strangers: where they come from, what they are, and what decodes them."""
