"""Trains: the arguments and the session of `fit`, and the steps of custom loops."""
