"""Models out of a run and into one: the formats of Hugging Face, safetensors and PyTorch."""
