"""One short wiring file per verb of ``ds-gpt``."""
