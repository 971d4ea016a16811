"""An index of vectors that a small model can search though a large one built it."""
