"""Scenarios run here: each cell gets its network, on which the contestants are measured."""
