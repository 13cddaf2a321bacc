"""Models as others write them, and what a private training step costs on each: see zoo.py."""
