"""Ray: ranks and servers as actors of a cluster."""
