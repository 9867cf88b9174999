"""Builds, benches and gates that ship with the package, found through importlib.resources."""
