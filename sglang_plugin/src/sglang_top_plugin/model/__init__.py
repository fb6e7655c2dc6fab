"""Stock SGLang's Qwen3 math, each operation by a kernel of the contract, each layer telling its own sharding."""
