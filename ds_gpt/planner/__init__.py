"""Memory and speed of a run before it is started: arithmetic on the composed configuration. No torch, no DeepSpeed."""
