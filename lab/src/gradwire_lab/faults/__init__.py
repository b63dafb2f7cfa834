"""Faults of real processes and hosts are brought about in jobs that train between namespaces."""
