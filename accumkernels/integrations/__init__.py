"""FusedAccumulator inside other people's training loops: one module per trainer, each needs the extra of its name."""
