"""True on-policy for stock SGLang."""
