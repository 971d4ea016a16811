"""Score models on tasks, and compare students with their teacher."""
