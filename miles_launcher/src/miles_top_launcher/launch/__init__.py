"""`miles-top plan`: everything that a launch of both engines needs, from a model, a cluster and a layout."""
