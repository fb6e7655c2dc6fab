"""What both engines must agree on: contract, layouts, receipts, digests, classed options.

Imports pydantic and the standard library only. Everything here is relative, so
the package works under any parent it is vendored into.
"""
