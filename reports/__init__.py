"""Rendering saved records as tables, charts, pages and CI files."""
