"""The training loop, for any loss and any data."""
