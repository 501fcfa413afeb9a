"""Generation: the link to the cluster, and from its tokens to answers, whole or streamed."""
