"""`miles-top doctor`: what is installed, what the contract needs, and what mends the difference."""
