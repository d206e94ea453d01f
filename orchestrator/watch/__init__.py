"""Watching a sweep: how far its cells are, what is left, and how the measures tighten while it runs."""
