"""Training: what `fit` is given, one session of it, and steps of loops of your own."""
