"""Indexes of texts and vectors: in a folder, or in Postgres with pgvector."""
