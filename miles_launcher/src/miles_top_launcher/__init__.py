"""The launcher of true on-policy runs: plans a run, starts the real engines, verifies them, reports. No numerics."""
