"""The embeddings server and its page."""
