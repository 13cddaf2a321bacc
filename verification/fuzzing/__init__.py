"""Random trainings for `fuzz.py`: what they are, how they are made, what must hold of them."""
