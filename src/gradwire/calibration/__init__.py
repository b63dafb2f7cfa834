"""How much loss each layer of a model bears."""
