"""Untrusted media bytes to pixels and samples. What is wrong with them is said in a TriptychError("bad_media")."""
