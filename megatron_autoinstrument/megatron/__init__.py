"""Megatron as this package finds it: seams and how they are patched, and what its own modules know."""
