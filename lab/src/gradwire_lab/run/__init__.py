"""Runs scenarios: builds each cell's network, races the contestants on it, gathers numbers."""
