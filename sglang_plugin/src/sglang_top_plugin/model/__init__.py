"""Stock SGLang's dense decoder, each operation by a kernel of the contract, each layer telling its own sharding."""
