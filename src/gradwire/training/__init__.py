"""The faces to torch: `attach`, the hook, and what a step does to its gradients."""
