"""Generation: the link to the cluster, and the answers made of its tokens, whole or streamed."""
