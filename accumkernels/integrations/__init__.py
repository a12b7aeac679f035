"""FusedAccumulator inside trainers' loops: one module per trainer, which needs the extra of the same name."""
