"""The control: the same comparison on stock SGLang and stock megatron-core, without either plugin's contract."""
