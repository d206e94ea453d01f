"""One slot of the cluster, without Ray: a supervisor, its training processes, and what becomes of a run in them."""
