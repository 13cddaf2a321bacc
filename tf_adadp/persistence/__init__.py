"""Saves data that outlive a run: the ledger of a set of weights, files, private state."""
