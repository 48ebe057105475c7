"""Stub."""
CHOICES = {"x": (1,)}
