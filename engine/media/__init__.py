"""Untrusted media bytes to pixels and samples. Damage is reported by TriptychError("bad_media"). Knows no model."""
