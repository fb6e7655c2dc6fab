"""One differentiable operation a file: the forward calls the contract's kernel set, the backward is our own in torch.

A backward need not match the rollout engine (it has none), but it is deterministic, accumulates in fp32 and rounds once
to the type of the tensor whose gradient it is. In float32 every one of those roundings is an identity.
"""
