"""Exit codes of `miles-top`."""

EXACT = 0
DIFFERS = 1
REFUSED = 2
INTERRUPTED = 130
