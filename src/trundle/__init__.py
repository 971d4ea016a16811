"""trundle: shrink any text-embedding model, keep your index."""
