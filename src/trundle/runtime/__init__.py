"""Use an exported model without torch."""
