"""Megatron layers under the contract: each says how it is sharded, and calls one operation of ``ops``."""
