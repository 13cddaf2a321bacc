"""Parity with tensorflow-privacy: what both sides compute, and what may differ."""
