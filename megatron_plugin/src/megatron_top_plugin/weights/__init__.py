"""Weights between Megatron's sharded parameters and Hugging Face tensors, for any TP and PP."""
