"""How an engine's process writes down what it computes, from outside its numerics: no kernel or layer calls this."""
