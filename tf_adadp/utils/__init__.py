"""What every room uses: checks of arguments, the process, flat groups of variables."""
