"""`miles-top diff`: the first operation whose result differs between the two engines."""
