"""`miles-top soak`: many rounds of everything that a long training run does to two engines."""
