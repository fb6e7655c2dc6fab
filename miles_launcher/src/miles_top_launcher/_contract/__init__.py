"""Vendored copy of contract_schema; written by `make vendor`, never edited here."""
