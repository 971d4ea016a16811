"""The embeddings server."""
