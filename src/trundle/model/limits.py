"""How much of a text is read where nobody says otherwise; light, so that options can name it without torch."""

LONGEST = 512
"""Tokens a text is cut to in training and measuring, where the model does not take fewer: the papers' own limit."""
