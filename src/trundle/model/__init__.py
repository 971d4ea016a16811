"""Models: anatomy, layout, cuts, cost, loading, saving and encoding."""
