"""Registered residuals; one file each, see `models/parts.py` for the interface."""
