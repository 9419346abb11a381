"""The benchmark measures what it says and writes what it measured."""
