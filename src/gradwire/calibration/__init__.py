"""How much loss each layer of a model bears."""

EPS = 0.05
"""The share of a step's loss decrease that the damage to one layer may cost."""

LR = 0.05
"""The learning rate of the plain gradient steps."""
