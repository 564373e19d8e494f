"""Declare cells, isolate them, time them, store one row each, resume."""
