"""Other libraries for private training: scripts that measure each in its own environment."""
